#include "kernels/group_importance.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/groups.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
using ImportanceKernel = void (*)(const T* score, const T* w, bool is_signed, const Piece& piece);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_importance-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
ImportanceKernel<T> active_kernel() {
  static const IsaTable<ImportanceKernel<T>> table = PYPRUNE_EACH_ISA(importance_kernel<T>());
  return table.active();
}

}  // namespace

std::vector<double> group_importance(const void* score, const void* w, bool is_signed, const Selection& selection) {
  std::vector<double> sums;
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernel<T>();
    sums = share_groups(selection, [&](const Piece& piece) {
      kernel(static_cast<const T*>(score), static_cast<const T*>(w), is_signed, piece);
    });
  });
  return sums;
}

}  // namespace pyprune
