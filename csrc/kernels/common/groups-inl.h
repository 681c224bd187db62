// Sums and updates of the selected groups, rows or columns alike, in a fixed order. For body files: see
// foreach_target.h; no include guard on purpose. A source evaluates elements, terms say what is summed, an update
// returns the new elements of its `out` from i on, with one scale a lane.
#include "kernels/common/rows-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

// A source: the weights with their offset.
template <class T>
struct Weights {
  using Storage = T;
  static constexpr int kArrays = 1;
  const T* w;
  float offset;
  template <class Extent>
  Pair at(std::int64_t i, Extent extent) const {
    return extent.weights(w + i, offset);
  }
};

template <class Terms>
void reduce(Terms terms, const Piece& piece) {
  if (!piece.by_row) return reduce_columns(terms, piece);
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    piece.sums[k] = checked_row_sum(terms, piece.row_start(k), piece.cols, Nothing{});
  }
}

// Sums, and in the same pass an update that does not wait for them.
template <class Terms, class Update>
void reduce_and_update_all(Terms terms, Update update, const Piece& piece, float scale) {
  using T = typename Terms::Storage;
  if (!piece.by_row) {
    reorder<T, true>(piece.selected, piece);
    over_columns(piece, false, SumAndUpdateColumns<Terms, Update>{
                                   {terms, piece.sums}, {update, nullptr, both(scale), piece.selected}});
    return finish_column_sums(terms, piece);
  }
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    const std::int64_t start = piece.row_start(k);
    piece.sums[k] = checked_row_sum(terms, start, piece.cols, OfRow<Update>{update, start, both(scale)});
  }
}

// A row is updated right after its sum, out of the core's own cache. Doing that in the same pass as the sum of the
// next row, or prefetching that row, was measured and gains nothing.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update_rows(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    const std::int64_t start = piece.row_start(k);
    piece.sums[k] = checked_row_sum(terms, start, piece.cols, Nothing{});
    update_row(OfRow<Update>{update, start, both(scale_of(piece.sums[k]))}, piece.cols);
  }
}

// Sums, then an update with a scale made of each group's sum.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  if (piece.by_row) return reduce_and_update_rows(terms, update, piece, scale_of);
  reduce_and_update_columns(terms, update, piece, scale_of);
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
