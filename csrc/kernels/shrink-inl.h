// Body of the multiplicative shrink, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
void shrink_body(T* w, float factor, const Piece& piece) {
  update_all<T>(Multiply<T>{w, w, piece.offset}, piece, factor);
}

}  // namespace

template <class T>
ShrinkKernel<T> shrink_kernel() {
  return shrink_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
