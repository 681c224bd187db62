// Bodies of the importance of groups, compiled once per instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T, bool kSigned, bool kExactly = sizeof(T) == sizeof(float)>
struct Products {
  using Storage = T;
  static constexpr int kArrays = 2;
  static constexpr bool kExact = kExactly;
  static constexpr int kChain = 1;
  const T* score;
  const T* w;
  float offset;
  Products<T, kSigned, true> exact() const { return {score, w, offset}; }
  template <class Extent>
  Pair term(std::int64_t i, Extent extent) const {
    const Pair product = extent.load(score + i) * extent.weights(w + i, offset);
    return kSigned ? product : absolute(product);
  }
  template <class Extent>
  void add(std::int64_t i, Extent extent, Sums* sums) const {
    const Pair a = extent.load(score + i), b = extent.weights(w + i, offset);
    if (kSigned) return sums->add_products(a, b);
    sums->add_products(absolute(a), absolute(b));
  }
};

template <class T>
void importance_body(const T* score, const T* w, bool is_signed, const Piece& piece) {
  if (is_signed) return reduce(Products<T, true>{score, w, piece.offset}, piece);
  reduce(Products<T, false>{score, w, piece.offset}, piece);
}

}  // namespace

template <class T>
ImportanceKernel<T> importance_kernel() {
  return importance_body<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
