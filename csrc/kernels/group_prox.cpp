#include "kernels/group_prox.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
using ProxKernel = void (*)(const T* w, T* out, double threshold, bool l1, const Piece& piece);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_prox-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
ProxKernel<T> active_kernel() {
  static const IsaTable<ProxKernel<T>> table = PYPRUNE_EACH_ISA(prox_kernel<T>());
  return table.active();
}

}  // namespace

void group_prox(const void* w, void* out, double threshold, bool l1, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernel<T>();
    share_groups(selection, [&](const Piece& piece) {
      kernel(static_cast<const T*>(w), static_cast<T*>(out), threshold, l1, piece);
    });
  });
}

}  // namespace pyprune
