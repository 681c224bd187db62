// Body of the group soft-threshold, compiled once per instruction set.
#include "kernels/common/shrink_groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
void threshold_body(const T* x, T* out, double threshold, const Piece& piece) {
  shrink_groups(Plain<T>{x}, out, threshold, piece);
}

}  // namespace

template <class T>
ThresholdKernel<T> threshold_kernel() {
  return threshold_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
