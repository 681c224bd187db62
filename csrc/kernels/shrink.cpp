#include "kernels/shrink.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
using ShrinkKernel = void (*)(T* w, float factor, const Piece& piece);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/shrink-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
ShrinkKernel<T> active_kernel() {
  static const IsaTable<ShrinkKernel<T>> table = PYPRUNE_EACH_ISA(shrink_kernel<T>());
  return table.active();
}

}  // namespace

void shrink(void* w, float factor, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernel<T>();
    share_groups(selection, [&](const Piece& piece) { kernel(static_cast<T*>(w), factor, piece); });
  });
}

}  // namespace pyprune
