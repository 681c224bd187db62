#include "kernels/moreau_step.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
struct MoreauKernels {
  void (*groups)(T* delta, const T* grad, const MoreauNumbers& n, const Piece& piece, double* moved, double* size);
  StepSums (*elements)(T* delta, const T* grad, const MoreauNumbers& n, std::int64_t begin, std::int64_t end);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/moreau_step-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
MoreauKernels<T> active_kernels() {
  static const IsaTable<MoreauKernels<T>> table = PYPRUNE_EACH_ISA(moreau_kernels<T>());
  return table.active();
}

// Elements of one sum where there are no groups; fixed, so that the sums do not depend on the number of threads.
constexpr std::int64_t kRun = 4096;

// In order, whatever the number of threads was.
StepSums totals(const std::vector<double>& moved, const std::vector<double>& size, std::int64_t count) {
  StepSums result{};
  for (std::int64_t k = 0; k < count; ++k) {
    result.moved += moved[k];
    result.size += size[k];
  }
  return result;
}

template <class T>
StepSums step_groups(T* delta, const T* grad, const MoreauNumbers& numbers, const Selection& groups) {
  const MoreauKernels<T> kernels = active_kernels<T>();
  // With room for a last block of columns that the matrix does not fill.
  std::vector<double> moved(groups.count + kColumnBlock), size(moved.size());
  share_groups(groups, [&](const Piece& piece) {
    kernels.groups(delta, grad, numbers, piece, moved.data(), size.data());
  });
  return totals(moved, size, groups.count);
}

template <class T>
StepSums step_elements(T* delta, const T* grad, const MoreauNumbers& numbers, const Selection& groups) {
  const MoreauKernels<T> kernels = active_kernels<T>();
  const std::int64_t elements = groups.rows * groups.cols, runs = (elements + kRun - 1) / kRun;
  std::vector<double> moved(runs), size(runs);
  parallel_for(runs, 1, groups.threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const StepSums sums =
          kernels.elements(delta, grad, numbers, k * kRun, std::min(elements, (k + 1) * kRun));
      moved[k] = sums.moved;
      size[k] = sums.size;
    }
  });
  return totals(moved, size, runs);
}

}  // namespace

StepSums moreau_step(void* delta, const void* grad, const MoreauNumbers& numbers, const Selection& groups) {
  StepSums sums{};
  with_storage(groups.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const target = static_cast<T*>(delta);
    const T* const slope = static_cast<const T*>(grad);
    sums = numbers.threshold > 0 ? step_groups(target, slope, numbers, groups)
                                 : step_elements(target, slope, numbers, groups);
  });
  return sums;
}

}  // namespace pyprune
