#include "kernels/regularised_adamw.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/group_penalty.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

using AdamKernel = void (*)(const AdamTensor& t, const float* coefficients, const AdamOptions& options,
                            std::int64_t begin, std::int64_t end);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/regularised_adamw-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

AdamKernel active_adam(DType dtype) {
  AdamKernel kernel = nullptr;
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    static const IsaTable<AdamKernel> table = PYPRUNE_EACH_ISA(adam_kernel<T>());
    kernel = table.active();
  });
  return kernel;
}

// One factor a group for the gradient of the penalty; empty without a penalty.
std::vector<float> coefficients_of(const AdamTensor& t, const AdamOptions& options) {
  if (t.index_count == 0) return {};
  std::vector<float> coefficients(static_cast<std::size_t>(t.by_row ? t.rows : t.cols), 0.0f);
  const bool l2 = t.penalty == AdamPenalty::kL2;
  std::vector<double> sums;
  if (l2) {
    sums = group_squares(t.weight, {t.rows, t.cols, t.by_row, t.index, t.index_count, t.offset, options.dtype,
                                    options.threads});
  }
  for (std::int64_t i = 0; i < t.index_count; ++i) {
    coefficients[static_cast<std::size_t>(t.index[i])] =
        l2 ? slope_scale(sums[static_cast<std::size_t>(i)], t.penalty_weight) : static_cast<float>(t.penalty_weight);
  }
  return coefficients;
}

}  // namespace

void regularised_adamw(const std::vector<AdamTensor>& tensors, const AdamOptions& options) {
  const AdamKernel update = active_adam(options.dtype);
  std::vector<std::vector<float>> coefficients;
  std::vector<std::int64_t> first_block{0};
  for (const AdamTensor& t : tensors) {
    coefficients.push_back(coefficients_of(t, options));
    first_block.push_back(first_block.back() + (t.rows * t.cols + kAdamBlock - 1) / kAdamBlock);
  }
  // All tensors are one line of blocks, so that many small ones are shared as evenly as one large one.
  parallel_for(first_block.back(), 8, options.threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const AdamTensor& t = tensors[i];
      const std::int64_t from = std::max(begin, first_block[i]), to = std::min(end, first_block[i + 1]);
      if (from >= to) continue;
      const float* own = coefficients[i].empty() ? nullptr : coefficients[i].data();
      update(t, own, options, (from - first_block[i]) * kAdamBlock,
             std::min(t.rows * t.cols, (to - first_block[i]) * kAdamBlock));
    }
  });
}

}  // namespace pyprune
