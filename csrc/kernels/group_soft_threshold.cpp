#include "kernels/group_soft_threshold.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
using ThresholdKernel = void (*)(T* w, double threshold, const Piece& piece);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_soft_threshold-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
ThresholdKernel<T> active_kernel() {
  static const IsaTable<ThresholdKernel<T>> table = PYPRUNE_EACH_ISA(threshold_kernel<T>());
  return table.active();
}

}  // namespace

void group_soft_threshold(void* w, double threshold, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernel<T>();
    share_groups(selection, [&](const Piece& piece) { kernel(static_cast<T*>(w), threshold, piece); });
  });
}

}  // namespace pyprune
