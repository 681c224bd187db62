#include "kernels/group_penalty.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
using PenaltyKernel = void (*)(const T* w, T* grad, double penalty_weight, bool l1, const Piece& piece);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_penalty-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
PenaltyKernel<T> active_kernel() {
  static const IsaTable<PenaltyKernel<T>> table = PYPRUNE_EACH_ISA(penalty_kernel<T>());
  return table.active();
}

// The sum of each selected group, of absolute values or of squares. Adds to the gradient, if there is one.
std::vector<double> penalty_sums(const void* w, void* grad, double penalty_weight, bool l1,
                                 const Selection& selection) {
  std::vector<double> sums;
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernel<T>();
    sums = share_groups(selection, [&](const Piece& piece) {
      kernel(static_cast<const T*>(w), static_cast<T*>(grad), penalty_weight, l1, piece);
    });
  });
  return sums;
}

}  // namespace

float slope_scale(double sum, double penalty_weight) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (sum == 0) return 0.0f;
  const double scale = penalty_weight / std::sqrt(sum);
  if (std::fabs(scale) > kLargest && std::isfinite(penalty_weight)) return scale < 0 ? -kLargest : kLargest;
  return static_cast<float>(scale);
}

std::vector<double> group_squares(const void* w, const Selection& selection) {
  return penalty_sums(w, nullptr, 0, false, selection);
}

double group_penalty(const void* w, void* grad, double penalty_weight, bool l1, const Selection& selection) {
  // Any NaN stands for every NaN; the one that bfloat16 can hold survives its rounding.
  if (std::isnan(penalty_weight)) penalty_weight = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> sums = penalty_sums(w, grad, penalty_weight, l1, selection);
  // In the order of the index, whatever the number of threads was.
  double value = 0;
  for (const double sum : sums) value += l1 ? sum : __builtin_sqrt(sum);
  return value;
}

}  // namespace pyprune
