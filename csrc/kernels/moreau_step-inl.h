// Bodies of the Moreau step, compiled once per instruction set. An element after the gradient step is evaluated twice,
// for the norm of its group and for the product, instead of being stored (and rounded) in between.
#include "kernels/common/groups-inl.h"

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
};

// Writes elements from i on, and adds the squares of the change and of the new values as they are stored.
template <class T, class Extent>
inline void step(const Stepped<T>& source, T* delta, std::int64_t i, Extent extent, Pair scale, Sums* moved,
                 Sums* size) {
  const Pair before = extent.load(delta + i);
  extent.store(delta + i, scaled(source.at(i, extent), scale));
  const Pair after = extent.load(delta + i);
  moved->add_squares(after - before);
  size->add_squares(after);
}

// The neighbouring elements [start, start + count), with one scale.
template <class T>
StepSums step_run(const Stepped<T> source, T* delta, std::int64_t start, std::int64_t count, float scale) {
  constexpr int kPairs = kLanes / kPair;
  Sums moved[kPairs] = {}, size[kPairs] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kPairs; ++j) {
      step(source, delta, start + i + j * kPair, Whole{}, both(scale), &moved[j], &size[j]);
    }
  }
  for (int j = 0; j < kPairs; ++j) {
    const std::int64_t at = i + j * kPair, left = count - at < kPair ? count - at : kPair;
    // A loop of constant length that checks for remaining elements keeps the sums in registers.
    if (left > 0) step(source, delta, start + at, Part{left}, both(scale), &moved[j], &size[j]);
  }
  return {sum_of_lanes<T>(moved), sum_of_lanes<T>(size)};
}

// Columns: the sums of each are kept, in the order of lanes.
template <class T>
struct StepColumns {
  static constexpr int kArrays = 2;
  Stepped<T> source;
  T* delta;
  const float* scales;
  double* moved;
  double* size;
  template <class SomeRows, class Extent>
  void operator()(SomeRows rows, const Panel&, std::int64_t col, Extent extent) const {
    const Pair scale{load_lanes(scales + col), load_lanes(scales + col + kWidth)};
    Sums own_moved, own_size;
    std::memcpy(&own_moved, moved + col, sizeof own_moved);
    std::memcpy(&own_size, size + col, sizeof own_size);
    for (int row = 0; row < rows.kCount; ++row) {
      step(source, delta, rows.at(row, col), extent, scale, &own_moved, &own_size);
    }
    std::memcpy(moved + col, &own_moved, sizeof own_moved);
    std::memcpy(size + col, &own_size, sizeof own_size);
  }
};

template <class T>
void moreau_groups(T* delta, const T* grad, const MoreauNumbers& n, const Piece& piece, double* moved, double* size) {
  const Stepped<T> source{delta, grad, n.decay, n.gamma};
  const Squares<Stepped<T>> squares{source};
  const auto scale_of = [&](double sum) { return shrink_scale(sum, n.threshold); };
  if (!piece.by_row) {
    reduce_to_column_scales(squares, piece, scale_of);
    // Backwards: the rows that were read last are in the cache.
    over_columns(piece, true, StepColumns<T>{source, delta, piece.scales, moved, size});
    reorder<T, false>(moved, piece);
    return reorder<T, false>(size, piece);
  }
  for (std::int64_t row = piece.begin; row < piece.end; ++row) {
    const std::int64_t start = piece.row_start(row);
    const float scale = scale_of(checked_row_sum(squares, start, piece.cols, Nothing{}));
    const StepSums sums = step_run(source, delta, start, piece.cols, scale);
    moved[row] = sums.moved;
    size[row] = sums.size;
  }
}

// Without a threshold, elements do not depend on each other.
template <class T>
StepSums moreau_elements(T* delta, const T* grad, const MoreauNumbers& n, std::int64_t begin, std::int64_t end) {
  return step_run(Stepped<T>{delta, grad, n.decay, n.gamma}, delta, begin, end - begin, 1.0f);
}

}  // namespace

template <class T>
MoreauKernels<T> moreau_kernels() {
  return {moreau_groups<T>, moreau_elements<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
