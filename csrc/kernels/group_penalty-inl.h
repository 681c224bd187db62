// Bodies of the group penalty and of its gradient, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T, bool kExactly = sizeof(T) == sizeof(float)>
struct Magnitudes {
  using Storage = T;
  static constexpr int kArrays = 1;
  static constexpr bool kExact = kExactly;
  static constexpr int kChain = kExact ? 1 : kChainRows;
  const T* w;
  float offset;
  Magnitudes<T, true> exact() const { return {w, offset}; }
  template <class Extent>
  Pair term(std::int64_t i, Extent extent) const {
    return absolute(extent.weights(w + i, offset));
  }
  template <class Extent>
  void add(std::int64_t i, Extent extent, Sums* sums) const {
    sums->add(term(i, extent));
  }
};

// Updates of the gradient.
template <class T>
struct AddScaled {
  static constexpr int kArrays = 2;
  const T* w;
  T* out;
  float offset;
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair scale) const {
    return extent.load(out + i) + extent.weights(w + i, offset) * scale;
  }
};

template <class T>
struct AddSigns {
  static constexpr int kArrays = 2;
  const T* w;
  T* out;
  float offset;
  // The comparison is false for 0 and for NaN.
  static Floats signs(Floats value, Floats scale) {
    const Words signed_scale = (Words)scale ^ ((Words)value & 0x80000000u);
    return (Floats)(signed_scale & (Words)(absolute(value) > 0.0f));
  }
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair scale) const {
    const Pair value = extent.weights(w + i, offset);
    return extent.load(out + i) + Pair{signs(value.first, scale.first), signs(value.second, scale.second)};
  }
};

template <class T>
void penalty_body(const T* w, T* grad, double penalty_weight, bool l1, const Piece& piece) {
  const Squares<Weights<T>> squares{{w, piece.offset}};
  const Magnitudes<T> magnitudes{w, piece.offset};
  if (grad == nullptr) {
    if (l1) return reduce(magnitudes, piece);
    return reduce(squares, piece);
  }
  if (l1) {
    const AddSigns<T> signs{w, grad, piece.offset};
    return reduce_and_update_all(magnitudes, signs, piece, static_cast<float>(penalty_weight));
  }
  reduce_and_update(squares, AddScaled<T>{w, grad, piece.offset}, piece,
                    [=](double sum) { return slope_scale(sum, penalty_weight); });
}

}  // namespace

template <class T>
PenaltyKernel<T> penalty_kernel() {
  return penalty_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
