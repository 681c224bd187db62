#include "kernels/slice_gather.h"

#include <cstdint>
#include <vector>

#include "dispatch.h"
#include "kernels/common/parallel.h"
#include "kernels/common/simd.h"

namespace pyprune {
namespace {

// Neighbouring columns of the source.
struct GatherRun {
  std::int64_t first;
  std::int64_t length;
};

using GatherKernel = void (*)(const void* w, void* out, const Gather& gather, const GatherRun* runs,
                              std::int64_t run_count, float scale, float offset, std::int64_t begin,
                              std::int64_t end);

struct GatherKernels {
  GatherKernel copy[4];   // elements of 1, 2, 4, 8 bytes
  GatherKernel scale[3];  // by DType
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/slice_gather-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

GatherKernels active_gather() {
  static const IsaTable<GatherKernels> table = PYPRUNE_EACH_ISA(gather_kernels());
  return table.active();
}

std::vector<GatherRun> runs_of(const Gather& gather) {
  if (gather.cols == nullptr) return {{0, gather.col_count}};
  std::vector<GatherRun> runs;
  for (std::int64_t j = 0; j < gather.col_count; ++j) {
    if (!runs.empty() && runs.back().first + runs.back().length == gather.cols[j]) {
      ++runs.back().length;
    } else {
      runs.push_back({gather.cols[j], 1});
    }
  }
  return runs;
}

// Below this mean length the bookkeeping of a run costs more than looking up each column.
constexpr std::int64_t kShortRun = 8;

void run_gather(GatherKernel kernel, const void* w, void* out, float scale, float offset, const Gather& gather) {
  const std::vector<GatherRun> runs = runs_of(gather);
  const std::int64_t run_count = static_cast<std::int64_t>(runs.size());
  const bool one_by_one = gather.cols != nullptr && gather.col_count < kShortRun * run_count;
  parallel_for(gather.row_count, 1, gather.threads, [&](std::int64_t begin, std::int64_t end) {
    kernel(w, out, gather, one_by_one ? nullptr : runs.data(), run_count, scale, offset, begin, end);
  });
}

}  // namespace

void slice_gather(const void* w, void* out, int element_bytes, const Gather& gather) {
  const int which = element_bytes == 1 ? 0 : element_bytes == 2 ? 1 : element_bytes == 4 ? 2 : 3;
  run_gather(active_gather().copy[which], w, out, 1.0f, 0.0f, gather);
}

void slice_gather_scaled(const void* w, void* out, DType dtype, float scale, float offset, const Gather& gather) {
  run_gather(active_gather().scale[static_cast<int>(dtype)], w, out, scale, offset, gather);
}

}  // namespace pyprune
