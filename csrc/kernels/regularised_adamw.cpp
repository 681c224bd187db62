#include "kernels/regularised_adamw.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/group_penalty.h"
#include "kernels/group_prox.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"

namespace pyprune {
namespace {

// Neighbouring selected groups: `length` groups from group `first` on, whose sums start at `position`.
struct GroupPiece {
  std::int64_t first;
  std::int64_t position;
  std::int64_t length;
};

struct AdamKernels {
  void (*update)(const AdamTensor& t, const float* coefficients, const AdamOptions& options, std::int64_t begin,
                 std::int64_t end);
  void (*scale)(const AdamTensor& t, const AdamOptions& options, const GroupPiece* pieces, std::int64_t count,
                const float* scales);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/regularised_adamw-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
AdamKernels active_adam() {
  static const IsaTable<AdamKernels> table = PYPRUNE_EACH_ISA(adam_kernels<T>());
  return table.active();
}

AdamKernels active_adam(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return active_adam<BFloat16>();
    case DType::kFloat16:
      return active_adam<Float16>();
    default:
      return active_adam<float>();
  }
}

// Columns are cut into pieces of at most this many, so that threads share the work.
constexpr std::int64_t kPieceColumns = 256;

std::vector<GroupPiece> pieces_of(const AdamTensor& t) {
  const std::int64_t limit = t.by_row ? 1 : kPieceColumns;
  std::vector<GroupPiece> pieces;
  for (std::int64_t i = 0; i < t.index_count; ++i) {
    const bool continues = !pieces.empty() && pieces.back().length < limit &&
                         pieces.back().first + pieces.back().length == t.index[i];
    if (continues) {
      ++pieces.back().length;
    } else {
      pieces.push_back({t.index[i], i, 1});
    }
  }
  return pieces;
}

Selection selection_of(const AdamTensor& t, const AdamOptions& options) {
  return {t.rows, t.cols, t.by_row, t.index, t.index_count, t.offset, options.dtype, options.threads};
}

// What the elements of each group get: the penalty's factor or the threshold. Empty: nothing.
std::vector<float> coefficients_of(const AdamTensor& t, const AdamOptions& options) {
  if (t.penalty == AdamPenalty::kNone || t.penalty == AdamPenalty::kL2Prox || t.index_count == 0) return {};
  std::vector<float> coefficients(static_cast<std::size_t>(t.by_row ? t.rows : t.cols), 0.0f);
  const bool l2 = t.penalty == AdamPenalty::kL2Gradient;
  std::vector<double> sums;
  if (l2) sums = group_squares(t.weight, selection_of(t, options));
  for (std::int64_t i = 0; i < t.index_count; ++i) {
    coefficients[static_cast<std::size_t>(t.index[i])] =
        l2 ? slope_scale(sums[static_cast<std::size_t>(i)], t.penalty_weight) : static_cast<float>(t.penalty_weight);
  }
  return coefficients;
}

void l2_prox(const AdamTensor& t, const AdamKernels& kernels, const AdamOptions& options) {
  if (!options.stochastic) {
    return group_prox(t.weight, t.weight, t.penalty_weight, false, selection_of(t, options));
  }
  const std::vector<GroupPiece> pieces = pieces_of(t);
  const std::vector<double> sums = group_squares(t.weight, selection_of(t, options));
  std::vector<float> scales;
  scales.reserve(sums.size());
  for (double sum : sums) scales.push_back(shrink_scale(sum, t.penalty_weight));
  parallel_for(static_cast<std::int64_t>(pieces.size()), 1, options.threads,
               [&](std::int64_t begin, std::int64_t end) {
                 kernels.scale(t, options, pieces.data() + begin, end - begin, scales.data());
               });
}

}  // namespace

void regularised_adamw(const std::vector<AdamTensor>& tensors, const AdamOptions& options) {
  const AdamKernels kernels = active_adam(options.dtype);
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
      kernels.update(t, own, options, (from - first_block[i]) * kAdamBlock,
                     std::min(t.rows * t.cols, (to - first_block[i]) * kAdamBlock));
    }
  });
  for (const AdamTensor& t : tensors) {
    if (t.penalty == AdamPenalty::kL2Prox && t.index_count > 0) l2_prox(t, kernels, options);
  }
}

}  // namespace pyprune
