// Bodies of the Moreau step, compiled once per instruction set.
#include "kernels/common/shrink_groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

// A source: the elements after the gradient step.
template <class T>
struct Stepped {
  using Storage = T;
  static constexpr int kArrays = 2;
  const T* delta;
  const T* grad;
  float decay;
  float gamma;
  template <class Extent>
  Pair at(std::int64_t i, Extent extent) const {
    return extent.load(delta + i) * spread(decay) - extent.load(grad + i) * spread(gamma);
  }
  Stepped shifted(std::int64_t offset) const { return {delta + offset, grad + offset, decay, gamma}; }
};

template <class T>
void moreau_groups(T* delta, const T* grad, float decay, float gamma, double threshold, const Piece& piece) {
  shrink_groups(Stepped<T>{delta, grad, decay, gamma}, delta, threshold, piece);
}

// Without a threshold, elements do not depend on each other.
template <class T>
void moreau_elements(T* delta, const T* grad, float decay, float gamma, std::int64_t begin, std::int64_t end) {
  const Stepped<T> source{delta, grad, decay, gamma};
  std::int64_t i = begin;
  for (; i + kPair <= end; i += kPair) store_pair(delta + i, source.at(i, Whole{}));
  if (i < end) store_pair_up_to(delta + i, source.at(i, Part{end - i}), end - i);
}

}  // namespace

template <class T>
MoreauKernels<T> moreau_kernels() {
  return {moreau_groups<T>, moreau_elements<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
