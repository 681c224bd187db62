// Body of the group soft-threshold, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

// An update of the weights: their product with a scale.
template <class T>
struct Multiply {
  static constexpr int kArrays = 1;
  T* out;
  float offset;
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair scale) const {
    return scaled(extent.weights(out + i, offset), scale) - both(offset);
  }
};

template <class T>
void threshold_body(T* w, double threshold, const Piece& piece) {
  reduce_and_update(Squares<Weights<T>>{{w, piece.offset}}, Multiply<T>{w, piece.offset}, piece,
                    [=](double sum) { return shrink_scale(sum, threshold); });
}

}  // namespace

template <class T>
ThresholdKernel<T> threshold_kernel() {
  return threshold_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
