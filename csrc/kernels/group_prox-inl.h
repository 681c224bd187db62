// Bodies of the proximal step of the group penalties, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
struct SoftThreshold {
  static constexpr int kArrays = 1;
  const T* w;
  T* out;
  float offset;
  // What is not longer than the threshold becomes +0; NaN is not shorter than anything.
  static Floats shortened(Floats value, Floats threshold) {
    const Floats width = (Floats)((Words)threshold | ((Words)value & 0x80000000u));
    return select((Words)(absolute(value) <= threshold), Floats{}, value - width);
  }
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair threshold) const {
    const Pair value = extent.weights(w + i, offset);
    return Pair{shortened(value.first, threshold.first), shortened(value.second, threshold.second)} - both(offset);
  }
};

template <class T>
void prox_body(const T* w, T* out, double threshold, bool l1, const Piece& piece) {
  if (l1) return update_all<T>(SoftThreshold<T>{w, out, piece.offset}, piece, static_cast<float>(threshold));
  reduce_and_update(Squares<Weights<T>>{{w, piece.offset}}, Multiply<T>{w, out, piece.offset}, piece,
                    [=](double sum) { return shrink_scale(sum, threshold); });
}

}  // namespace

template <class T>
ProxKernel<T> prox_kernel() {
  return prox_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
