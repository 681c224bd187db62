// Work sharing over rows or columns. Kept out of the per-target bodies, which stay single-threaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace pyprune {

// Calls body(begin, end) on contiguous pieces of [0, count), one per thread. Pieces start at multiples of `grain`,
// so a group is never shared and the result does not depend on the number of threads.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t grain, int threads, const Body& body) {
  const std::int64_t blocks = (count + grain - 1) / grain;
  const std::int64_t pieces = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, blocks));
  if (pieces == 1) {
    body(std::int64_t{0}, count);
    return;
  }
  std::exception_ptr failure;  // no memory for a buffer; what leaves a parallel region ends the process
#ifdef _OPENMP
  // All threads are asked for, though some may stay idle: where a team is smaller than the last one libgomp ends the
  // surplus threads, and starts them again for the next larger one (docs/reference/kernels.md has what that costs).
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    const std::int64_t begin = std::min(count, blocks * piece / pieces * grain);
    const std::int64_t end = std::min(count, blocks * (piece + 1) / pieces * grain);
    try {
      if (begin < end) body(begin, end);
    } catch (...) {
#ifdef _OPENMP
#pragma omp critical(pyprune_failure)
#endif
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace pyprune
