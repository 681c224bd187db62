// Bodies of the operations on an index set, compiled once per instruction set. Each is a reduction over the elements of
// a group, in double and in a fixed order, and an update of the elements that knows its group's scale. Rows do both
// while the row is in the cache; columns go down the matrix for the sums and up again for the update, over whole pieces
// of rows, so that what was read last is found in the cache.
#include "kernels/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = 32;
constexpr int kRowsAtOnce = 4;
constexpr float kLargest = 3.4028234663852886e38f;

inline Floats absolute(Floats value) { return (Floats)((Words)value & 0x7fffffffu); }
inline Floats select(Words mask, Floats yes, Floats no) {
  return (Floats)(((Words)yes & mask) | ((Words)no & ~mask));
}

// What is summed. terms() adds one register of elements to two registers of sums.
template <class T>
struct Squares {
  const T* w;
  void terms(std::int64_t i, std::int64_t count, Doubles* low, Doubles* high) const {
    const Floats value = load_up_to(w + i, count);
    *low = add_square(*low, lower(value));
    *high = add_square(*high, upper(value));
  }
};

template <class T>
struct Magnitudes {
  const T* w;
  void terms(std::int64_t i, std::int64_t count, Doubles* low, Doubles* high) const {
    const Floats value = absolute(load_up_to(w + i, count));
    *low += lower(value);
    *high += upper(value);
  }
};

template <class T>
struct Products {
  const T* score;
  const T* w;
  void terms(std::int64_t i, std::int64_t count, Doubles* low, Doubles* high) const {
    const Floats a = absolute(load_up_to(score + i, count)), b = absolute(load_up_to(w + i, count));
    // Exact in double, so that no score is lost to underflow.
    *low += lower(a) * lower(b);
    *high += upper(a) * upper(b);
  }
};

// What is done to the elements. at() works on up to a register of them; scale holds one value a lane.
template <class T>
struct AddScaled {
  const T* w;
  T* grad;
  void at(std::int64_t i, std::int64_t count, Floats scale) const {
    store_up_to(grad + i, load_up_to(grad + i, count) + load_up_to(w + i, count) * scale, count);
  }
};

template <class T>
struct AddSigns {
  const T* w;
  T* grad;
  void at(std::int64_t i, std::int64_t count, Floats scale) const {
    const Floats value = load_up_to(w + i, count);
    const Floats step = (Floats)((Words)scale ^ ((Words)value & 0x80000000u));
    const Floats signs = select((Words)(value == 0.0f), Floats{}, select((Words)(value != value), value, step));
    store_up_to(grad + i, load_up_to(grad + i, count) + signs, count);
  }
};

template <class T>
struct Multiply {
  T* w;
  void at(std::int64_t i, std::int64_t count, Floats scale) const {
    const Floats product = load_up_to(w + i, count) * scale;
    store_up_to(w + i, select((Words)(scale == 0.0f), Floats{}, product), count);
  }
};

template <class T>
struct SoftThreshold {
  T* w;
  void at(std::int64_t i, std::int64_t count, Floats threshold) const {
    const Floats value = load_up_to(w + i, count);
    const Words inside = (Words)(absolute(value) <= threshold);
    const Floats width = (Floats)((Words)threshold | ((Words)value & 0x80000000u));
    store_up_to(w + i, select(inside, Floats{}, value - width), count);
  }
};

template <class Terms>
double row_sum(Terms terms, std::int64_t start, std::int64_t count) {
  Doubles sums[kLanes * 2 / kWidth] = {};
  constexpr int kRegisters = kLanes / kWidth;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kRegisters; ++j) {
      terms.terms(start + i + j * kWidth, kWidth, &sums[2 * j], &sums[2 * j + 1]);
    }
  }
  // Lanes beyond the end are loaded as zeros, which add nothing.
  for (int j = 0; i < count; ++j, i += kWidth) {
    terms.terms(start + i, count - i, &sums[2 * j], &sums[2 * j + 1]);
  }
  double lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Sums of the columns of a run, each over its rows in order.
template <class Terms>
void run_sums(Terms terms, const Run& run, const Piece& piece, std::int64_t row, int rows) {
  for (std::int64_t done = 0; done < run.length; done += kWidth) {
    const std::int64_t count = run.length - done < kWidth ? run.length - done : kWidth;
    double padded[kWidth] = {};
    double* const kept = piece.sums + run.position + done;
    double* const sums = count == kWidth ? kept : padded;
    for (int i = 0; sums == padded && i < count; ++i) padded[i] = kept[i];
    Doubles low = load_lanes(sums), high = load_lanes(sums + kWidth / 2);
    for (int i = 0; i < rows; ++i) {
      terms.terms((row + i) * piece.cols + run.column + done, count, &low, &high);
    }
    store_lanes(sums, low);
    store_lanes(sums + kWidth / 2, high);
    for (int i = 0; sums == padded && i < count; ++i) kept[i] = padded[i];
  }
}

template <class Terms>
void column_sums(Terms terms, const Piece& piece) {
  for (std::int64_t row = 0; row < piece.rows; row += kRowsAtOnce) {
    const int rows = static_cast<int>(piece.rows - row < kRowsAtOnce ? piece.rows - row : kRowsAtOnce);
    for (std::int64_t r = 0; r < piece.run_count; ++r) run_sums(terms, piece.runs[r], piece, row, rows);
  }
}

template <class Update>
void update_row(Update update, std::int64_t start, std::int64_t count, float scale) {
  const Floats scales = spread(scale);
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) update.at(start + i, kWidth, scales);
  if (i < count) update.at(start + i, count - i, scales);
}

template <class Update, class Scale>
void update_columns(Update update, const Piece& piece, Scale scale_at) {
  for (std::int64_t row = piece.rows - 1; row >= 0; --row) {
    for (std::int64_t r = 0; r < piece.run_count; ++r) {
      const Run& run = piece.runs[r];
      const std::int64_t start = row * piece.cols + run.column;
      std::int64_t i = 0;
      for (; i + kWidth <= run.length; i += kWidth) update.at(start + i, kWidth, scale_at(run.position + i, kWidth));
      if (i < run.length) update.at(start + i, run.length - i, scale_at(run.position + i, run.length - i));
    }
  }
}

// The same scale everywhere.
template <class Update>
void update_all(Update update, const Piece& piece, float scale) {
  if (!piece.by_row) {
    return update_columns(update, piece, [=](std::int64_t, std::int64_t) { return spread(scale); });
  }
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    update_row(update, piece.index[k] * piece.cols, piece.cols, scale);
  }
}

template <class Terms>
void reduce(Terms terms, const Piece& piece) {
  if (!piece.by_row) return column_sums(terms, piece);
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    piece.sums[k] = row_sum(terms, piece.index[k] * piece.cols, piece.cols);
  }
}

// Sums, then an update with a scale made of each group's sum.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  if (piece.by_row) {
    for (std::int64_t k = piece.begin; k < piece.end; ++k) {
      const std::int64_t start = piece.index[k] * piece.cols;
      piece.sums[k] = row_sum(terms, start, piece.cols);
      update_row(update, start, piece.cols, scale_of(piece.sums[k]));
    }
    return;
  }
  column_sums(terms, piece);
  for (std::int64_t k = piece.begin; k < piece.end; ++k) piece.scales[k] = scale_of(piece.sums[k]);
  const float* scales = piece.scales;
  update_columns(update, piece,
                 [=](std::int64_t position, std::int64_t count) { return load_up_to(scales + position, count); });
}

template <class T>
void penalty_body(const T* w, T* grad, double strength, bool l1, const Piece& piece) {
  if (grad == nullptr) {
    if (l1) return reduce(Magnitudes<T>{w}, piece);
    return reduce(Squares<T>{w}, piece);
  }
  if (l1) {
    const float step = static_cast<float>(strength);
    return reduce_and_update(Magnitudes<T>{w}, AddSigns<T>{w, grad}, piece, [=](double) { return step; });
  }
  // A zero group has gradient zero; a NaN norm fails the comparisons and spreads over its group.
  reduce_and_update(Squares<T>{w}, AddScaled<T>{w, grad}, piece, [=](double sum) {
    const double scale = strength / __builtin_sqrt(sum);
    return sum == 0 ? 0.0f : (scale > kLargest ? kLargest : static_cast<float>(scale));
  });
}

template <class T>
void prox_body(T* w, double threshold, bool l1, const Piece& piece) {
  if (l1) return update_all(SoftThreshold<T>{w}, piece, static_cast<float>(threshold));
  reduce_and_update(Squares<T>{w}, Multiply<T>{w}, piece, [=](double sum) {
    const double norm = __builtin_sqrt(sum);
    return norm <= threshold ? 0.0f : static_cast<float>(1.0 - threshold / norm);
  });
}

template <class T>
void shrink_body(T* w, float factor, const Piece& piece) {
  update_all(Multiply<T>{w}, piece, factor);
}

template <class T>
void importance_body(const T* score, const T* w, const Piece& piece) {
  reduce(Products<T>{score, w}, piece);
}

}  // namespace

template <class T>
IndexSetKernels<T> index_set_kernels() {
  return {penalty_body<T>, prox_body<T>, shrink_body<T>, importance_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
