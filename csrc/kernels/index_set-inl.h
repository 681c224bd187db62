// Bodies of the operations on an index set, compiled once per instruction set. Each is a sum over the elements of a
// group, in double and in a fixed order, and an update of the elements that knows its group's scale.
#include "kernels/rows-inl.h"

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

// What is done to the elements: at() is what the elements of `out` from i on become; scale has one value a lane.
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
struct SoftThreshold {
  static constexpr int kArrays = 1;
  T* out;
  float offset;
  // What is not longer than the threshold becomes +0; NaN is not shorter than anything.
  static Floats shortened(Floats value, Floats threshold) {
    const Floats width = (Floats)((Words)threshold | ((Words)value & 0x80000000u));
    return select((Words)(absolute(value) <= threshold), Floats{}, value - width);
  }
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair threshold) const {
    const Pair value = extent.weights(out + i, offset);
    return Pair{shortened(value.first, threshold.first), shortened(value.second, threshold.second)} - both(offset);
  }
};

template <class Terms>
void reduce(Terms terms, const Piece& piece) {
  if (!piece.by_row) return reduce_columns(terms, piece);
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    piece.sums[k] = checked_row_sum(terms, piece.index[k] * piece.cols, piece.cols, Nothing{});
  }
}

// The same scale everywhere.
template <class T, class Update>
void update_all(Update update, const Piece& piece, float scale) {
  if (!piece.by_row) {
    reorder<T, true>(piece.selected, piece);
    return over_columns(piece, false, UpdateColumns<Update>{update, nullptr, both(scale), piece.selected});
  }
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    update_row(OfRow<Update>{update, piece.index[k] * piece.cols, both(scale)}, piece.cols);
  }
}

// Sums beside an update that does not wait for them.
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
    const std::int64_t start = piece.index[k] * piece.cols;
    piece.sums[k] = checked_row_sum(terms, start, piece.cols, OfRow<Update>{update, start, both(scale)});
  }
}

// A row is updated right after its sum, out of the core's own cache. Doing that beside the sum of the next row, or asking
// for that row early, was measured and gains nothing.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update_rows(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    const std::int64_t start = piece.index[k] * piece.cols;
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

template <class T>
void prox_body(T* w, double threshold, bool l1, const Piece& piece) {
  if (l1) return update_all<T>(SoftThreshold<T>{w, piece.offset}, piece, static_cast<float>(threshold));
  reduce_and_update(Squares<Weights<T>>{{w, piece.offset}}, Multiply<T>{w, piece.offset}, piece,
                    [=](double sum) { return shrink_scale(sum, threshold); });
}

template <class T>
void shrink_body(T* w, float factor, const Piece& piece) {
  update_all<T>(Multiply<T>{w, piece.offset}, piece, factor);
}

template <class T>
void importance_body(const T* score, const T* w, bool is_signed, const Piece& piece) {
  if (is_signed) return reduce(Products<T, true>{score, w, piece.offset}, piece);
  reduce(Products<T, false>{score, w, piece.offset}, piece);
}

}  // namespace

template <class T>
IndexSetKernels<T> index_set_kernels() {
  return {penalty_body<T>, prox_body<T>, shrink_body<T>, importance_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
