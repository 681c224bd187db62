// Body of the group soft-threshold, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
void threshold_body(T* w, double threshold, const Piece& piece) {
  reduce_and_update(Squares<Weights<T>>{{w, piece.offset}}, Multiply<T>{w, w, piece.offset}, piece,
                    [=](double sum) { return shrink_scale(sum, threshold); });
}

}  // namespace

template <class T>
ThresholdKernel<T> threshold_kernel() {
  return threshold_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
