// "Evaluate each element, shrink its group", into another matrix or the same: shared by the group soft-threshold and
// the Moreau step. For body files: see foreach_target.h; no include guard on purpose.
//
// A source evaluates element i in float32, and the groups are rows or columns. An element is evaluated twice, for the
// norm and for the product, instead of being stored (and rounded) in between. Sums run in double over a fixed number of
// lanes: squares of float32 can neither overflow nor vanish, and the result is the same on every instruction set.
#include "kernels/common/groups-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

// kNumbers: no element of the row is NaN. out may be what the source reads: an element is evaluated before it is
// written, and nothing later needs it.
template <bool kNumbers, class Source, class T>
void multiply(Source source, T* out, std::int64_t count, float scale) {
  const Floats scales = spread(scale);
  std::int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    const Pair product = source.at(i, Whole{}) * scales;
    if constexpr (kNumbers) {
      store_numbers(out + i, product);
    } else {
      store_pair(out + i, product);
    }
  }
  if (i < count) store_pair_up_to(out + i, source.at(i, Part{count - i}) * scales, count - i);
}

template <class Source, class T>
void shrink_rows(Source all, T* out, double threshold, const Piece& piece) {
  for (std::int64_t row = piece.begin; row < piece.end; ++row) {
    const Source source = all.shifted(piece.row_start(row));
    T* target = out + piece.row_start(row);
    const double sum = checked_row_sum(Squares<Source>{source}, 0, piece.cols, Nothing{});
    const float scale = shrink_scale(sum, threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      std::memset(target, 0, piece.cols * sizeof(T));
    } else if (std::isfinite(sum)) {
      multiply<true>(source, target, piece.cols, scale);
    } else {
      multiply<false>(source, target, piece.cols, scale);
    }
  }
}

template <class Source, class T>
struct ProductOf {
  static constexpr int kArrays = Source::kArrays;
  Source source;
  T* out;
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair scale) const {
    return scaled(source.at(i, extent), scale);
  }
};

template <class Source, class T>
void shrink_columns(Source source, T* out, double threshold, const Piece& piece) {
  reduce_and_update_columns(Squares<Source>{source}, ProductOf<Source, T>{source, out}, piece,
                            [=](double sum) { return shrink_scale(sum, threshold); });
}

template <class Source, class T>
void shrink_groups(Source source, T* out, double threshold, const Piece& piece) {
  if (piece.by_row) {
    shrink_rows(source, out, threshold, piece);
  } else {
    shrink_columns(source, out, threshold, piece);
  }
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
