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
  void (*groups)(T* delta, const T* grad, float decay, float gamma, double threshold, const Piece& piece);
  void (*elements)(T* delta, const T* grad, float decay, float gamma, std::int64_t begin, std::int64_t end);
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

}  // namespace

void moreau_step(void* delta, const void* grad, float decay, float gamma, double threshold, const Selection& groups) {
  with_storage(groups.dtype, [&](auto tag) {
    using T = decltype(tag);
    const MoreauKernels<T> kernels = active_kernels<T>();
    T* const target = static_cast<T*>(delta);
    const T* const slope = static_cast<const T*>(grad);
    if (threshold > 0) {
      share_groups(groups, [&](const Piece& piece) { kernels.groups(target, slope, decay, gamma, threshold, piece); });
      return;
    }
    parallel_for(groups.rows, 1, groups.threads, [&](std::int64_t begin, std::int64_t end) {
      kernels.elements(target, slope, decay, gamma, begin * groups.cols, end * groups.cols);
    });
  });
}

}  // namespace pyprune
