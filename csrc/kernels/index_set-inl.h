// Bodies of the operations on an index set, compiled once per instruction set. Each is a sum over the elements of a
// group, in double and in a fixed order, and an update of the elements that knows its group's scale. A row is updated
// in the same loop that sums the next one, so that memory always has something to deliver. Columns go down the matrix
// for the sums and up again for the update, over whole pieces of rows: narrow panels, which would stay in the cache,
// touch a new page every few hundred bytes and cost more than they save.
#include "kernels/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = kColumnBlock;
// Columns: this many streams from memory at once, and rows in blocks that no chain of sums crosses.
constexpr int kStreams = 8;
constexpr int kChainRows = 4;
constexpr float kLargest = 3.4028234663852886e38f;

inline Floats absolute(Floats value) { return (Floats)((Words)value & 0x7fffffffu); }

inline Floats select(Words mask, Floats yes, Floats no) {
  return (Floats)(((Words)yes & mask) | ((Words)no & ~mask));
}

inline Pair both(float value) { return {spread(value), spread(value)}; }
inline Pair absolute(Pair value) { return {absolute(value.first), absolute(value.second)}; }

// How to reach the elements of a pair: all of them, or the first `count`. Weights come with the unit offset of norms
// that multiply by 1 + w; weights beyond the count are 0.
struct Whole {
  static constexpr bool empty() { return false; }
  template <class T>
  Pair load(const T* x) const {
    return load_pair(x);
  }
  template <class T>
  Pair weights(const T* w, float offset) const {
    const Pair value = load_pair(w);
    if (__builtin_expect(offset == 0, 1)) return value;
    return value + both(offset);
  }
  template <class T>
  void store(T* out, Pair value) const {
    store_numbers(out, value);
  }
};

struct Part {
  std::int64_t count;
  bool empty() const { return count <= 0; }
  template <class T>
  Pair load(const T* x) const {
    return load_pair_up_to(x, count);
  }
  template <class T>
  Pair weights(const T* w, float offset) const {
    float offsets[kPair] = {};
    for (std::int64_t i = 0; i < count; ++i) offsets[lane_of<T>(static_cast<int>(i))] = offset;
    return load(w) + Pair{load_lanes(offsets), load_lanes(offsets + kWidth)};
  }
  template <class T>
  void store(T* out, Pair value) const {
    T padded[kPair];
    store_numbers(padded, value);
    for (std::int64_t i = 0; i < count; ++i) out[i] = padded[i];
  }
};

// One sum a lane of a pair.
struct Sums {
  Doubles part[4];

  void add(Pair value) {
    part[0] += lower(value.first);
    part[1] += upper(value.first);
    part[2] += lower(value.second);
    part[3] += upper(value.second);
  }
  void add_squares(Pair value) {
    part[0] = add_square(part[0], lower(value.first));
    part[1] = add_square(part[1], upper(value.first));
    part[2] = add_square(part[2], lower(value.second));
    part[3] = add_square(part[3], upper(value.second));
  }
  void add_products(Pair a, Pair b) {
    part[0] += lower(a.first) * lower(b.first);
    part[1] += upper(a.first) * upper(b.first);
    part[2] += lower(a.second) * lower(b.second);
    part[3] += upper(a.second) * upper(b.second);
  }
};

// Some neighbouring rows.
template <int kNumber>
struct Rows {
  static constexpr int kCount = kNumber;
  std::int64_t start;
  std::int64_t stride;
  std::int64_t at(int row, std::int64_t col) const { return start + row * stride + col; }
};

// What is summed; kArrays is how many arrays that reads. Exact terms join their lanes' sums in double, one by one. The others are for 16-bit storage, whose
// conversion to double costs more than memory takes to deliver: the terms are made in float32, where the square or
// product of two such numbers is exact, and kChain of them are added there first, which costs a sum at most 2e-7 of
// itself. That fails beyond the range of float32; usable() tells, and the sum is made of exact terms then.
template <class T, bool kExactly = sizeof(T) == sizeof(float)>
struct Squares {
  using Storage = T;
  static constexpr int kArrays = 1;
  static constexpr bool kExact = kExactly;
  static constexpr int kChain = kExact ? 1 : kChainRows;
  const T* w;
  float offset;
  Squares<T, true> exact() const { return {w, offset}; }
  template <class Extent>
  Pair term(std::int64_t i, Extent extent) const {
    const Pair value = extent.weights(w + i, offset);
    return value * value;
  }
  template <class Extent>
  void add(std::int64_t i, Extent extent, Sums* sums) const {
    sums->add_squares(extent.weights(w + i, offset));
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

// Whether a sum of terms that are not exact is good to the precision of float32, whatever the number of terms.
inline bool usable(double sum) {
  const double magnitude = __builtin_fabs(sum);
  return magnitude > 1e-30 && magnitude < 1e38;
}

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
  // Chosen, not multiplied: a removed element is exactly +0, whatever it was.
  static Floats product(Floats value, Floats scale) {
    return select((Words)(scale == 0.0f), Floats{}, value * scale);
  }
  template <class Extent>
  Pair at(std::int64_t i, Extent extent, Pair scale) const {
    const Pair value = extent.weights(out + i, offset);
    return Pair{product(value.first, scale.first), product(value.second, scale.second)} - both(offset);
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

// An update of the row that starts at `start`, with one scale.
template <class Update>
struct OfRow {
  Update update;
  std::int64_t start;
  Pair scale;
  template <class Extent>
  void operator()(std::int64_t i, Extent extent) const {
    extent.store(update.out + start + i, update.at(start + i, extent, scale));
  }
};

// Nothing to do beside a sum.
struct Nothing {
  template <class Extent>
  void operator()(std::int64_t, Extent) const {}
};

// From lanes' order to the columns' own, or back.
template <class T, bool kToLanes, class Value>
void reorder(Value* values, const Piece& piece) {
  for (std::int64_t p = 0; p < piece.panel_count; ++p) {
    for (std::int64_t col = piece.panels[p].begin; col < piece.panels[p].end; col += kPair) {
      Value old[kPair];
      std::memcpy(old, values + col, sizeof old);
      for (int i = 0; i < kPair; ++i) {
        if (kToLanes) {
          values[col + lane_of<T>(i)] = old[i];
        } else {
          values[col + i] = old[lane_of<T>(i)];
        }
      }
    }
  }
}

// kChain times kLanes elements of a row from i on, or up to the end.
template <class Terms, class Also, class ExtentAt>
inline void add_stretch(Terms terms, std::int64_t start, std::int64_t i, ExtentAt extent_at, Sums* sums, Also also) {
  for (int j = 0; j < kLanes / kPair; ++j) {
    Pair chain = both(0);
    for (int link = 0; link < Terms::kChain; ++link) {
      const std::int64_t at = i + link * kLanes + j * kPair;
      const auto extent = extent_at(at);
      if (extent.empty()) continue;
      if (Terms::kExact) {
        terms.add(start + at, extent, &sums[j]);
      } else {
        chain = chain + terms.term(start + at, extent);
      }
      also(at, extent);
    }
    if (!Terms::kExact) sums[j].add(chain);
  }
}

// The sum of a row. `also` is called on every stretch of [0, count).
template <class Terms, class Also>
double row_sum(Terms terms, std::int64_t start, std::int64_t count, Also also) {
  constexpr int kStretch = Terms::kChain * kLanes;
  Sums sums[kLanes / kPair] = {};
  std::int64_t i = 0;
  for (; i + kStretch <= count; i += kStretch) {
    add_stretch(terms, start, i, [](std::int64_t) { return Whole{}; }, sums, also);
  }
  add_stretch(terms, start, i, [=](std::int64_t at) { return Part{count - at < kPair ? count - at : kPair}; }, sums,
              also);
  double unordered[kLanes], lanes[kLanes];
  std::memcpy(unordered, sums, sizeof unordered);
  in_order<typename Terms::Storage>(unordered, lanes, kLanes);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class Terms, class Also>
double checked_row_sum(Terms terms, std::int64_t start, std::int64_t count, Also also) {
  const double sum = row_sum(terms, start, count, also);
  if (Terms::kExact || usable(sum)) return sum;
  return row_sum(terms.exact(), start, count, Nothing{});
}

template <class Update>
void update_row(const OfRow<Update>& row, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kPair <= count; i += kPair) row(i, Whole{});
  if (i < count) row(i, Part{count - i});
}

template <class Work, class SomeRows>
inline void over_panels(const Piece& piece, Work work, SomeRows rows) {
  for (std::int64_t p = 0; p < piece.panel_count; ++p) {
    const Panel& panel = piece.panels[p];
    std::int64_t col = panel.begin;
    for (; col + kPair <= panel.end; col += kPair) work(rows, panel, col, Whole{});
    if (col < panel.end) work(rows, panel, col, Part{panel.end - col});
  }
}

template <int kRows, class Work>
void over_rows(const Piece& piece, std::int64_t begin, std::int64_t end, bool up, Work work) {
  for (std::int64_t done = 0; begin + done < end; done += kRows) {
    const std::int64_t row = up ? end - done - kRows : begin + done;
    over_panels(piece, work, Rows<kRows>{row * piece.cols, piece.cols});
  }
}

// Calls work(rows, panel, col, extent) on every pair of selected columns of some rows at a time: several rows share what
// is known of the columns, and keep several streams from memory going. `up` begins at the last row.
template <class Work>
void over_columns(const Piece& piece, bool up, Work work) {
  constexpr int kRows = kStreams / Work::kArrays;
  const std::int64_t many = piece.rows / kRows * kRows, few = piece.rows / kChainRows * kChainRows;
  if (up) over_rows<1>(piece, few, piece.rows, up, work);
  if (up) over_rows<kChainRows>(piece, many, few, up, work);
  over_rows<kRows>(piece, 0, many, up, work);
  if (!up) over_rows<kChainRows>(piece, many, few, up, work);
  if (!up) over_rows<1>(piece, few, piece.rows, up, work);
}

// Sums of columns, each over its rows in order; they are kept in the order of lanes.
template <class Terms>
struct SumColumns {
  static constexpr int kArrays = Terms::kArrays;
  Terms terms;
  double* kept;
  template <class SomeRows, class Extent>
  void operator()(SomeRows rows, const Panel&, std::int64_t col, Extent extent) const {
    Sums sums;
    Pair chain = both(0);
    std::memcpy(&sums, kept + col, sizeof sums);
    for (int row = 0; row < rows.kCount; ++row) {
      const std::int64_t at = rows.at(row, col);
      if (Terms::kExact) {
        terms.add(at, extent, &sums);
      } else {
        chain = chain + terms.term(at, extent);
      }
      if (!Terms::kExact && (row + 1 == rows.kCount || (row + 1) % Terms::kChain == 0)) {
        sums.add(chain);
        chain = both(0);
      }
    }
    std::memcpy(kept + col, &sums, sizeof sums);
  }
};

// scales: one a column in the order of lanes; or null, then `scale` is everybody's.
template <class Update>
struct UpdateColumns {
  static constexpr int kArrays = Update::kArrays;
  Update update;
  const float* scales;
  Pair scale;
  const std::uint32_t* selected;
  template <class SomeRows, class Extent>
  void operator()(SomeRows rows, const Panel& panel, std::int64_t col, Extent extent) const {
    const Pair own = scales == nullptr ? scale : Pair{load_lanes(scales + col), load_lanes(scales + col + kWidth)};
    if (panel.whole) {
      for (int row = 0; row < rows.kCount; ++row) {
        const std::int64_t at = rows.at(row, col);
        extent.store(update.out + at, update.at(at, extent, own));
      }
      return;
    }
    Words masks[2];
    std::memcpy(masks, selected + col, sizeof masks);
    for (int row = 0; row < rows.kCount; ++row) {
      const std::int64_t at = rows.at(row, col);
      const Pair value = update.at(at, extent, own), old = extent.load(update.out + at);
      extent.store(update.out + at,
                   {select(masks[0], value.first, old.first), select(masks[1], value.second, old.second)});
    }
  }
};

// Both at once, where the update does not wait for the sums.
template <class Terms, class Update>
struct SumAndUpdateColumns {
  static constexpr int kArrays = Update::kArrays;
  SumColumns<Terms> sum;
  UpdateColumns<Update> update;
  template <class SomeRows, class Extent>
  void operator()(SomeRows rows, const Panel& panel, std::int64_t col, Extent extent) const {
    sum(rows, panel, col, extent);
    update(rows, panel, col, extent);
  }
};

// Makes the sums of columns what they must be, and puts them in order. Each block of columns decides alone whether its sums
// are usable, so that nothing depends on how the columns are shared between threads.
template <class Terms>
void finish_column_sums(Terms terms, const Piece& piece) {
  if (!Terms::kExact) {
    std::vector<Panel> unusable;
    for (std::int64_t p = 0; p < piece.panel_count; ++p) {
      const Panel& panel = piece.panels[p];
      for (std::int64_t col = panel.begin; col < panel.end; col += kColumnBlock) {
        const std::int64_t end = col + kColumnBlock < panel.end ? col + kColumnBlock : panel.end;
        // The lanes of a last block that the matrix does not fill are in any order, some of them empty.
        bool good = end - col == kColumnBlock;
        for (std::int64_t i = col; i < end; ++i) good = good && usable(piece.sums[i]);
        if (good) continue;
        std::memset(piece.sums + col, 0, kColumnBlock * sizeof(double));
        unusable.push_back({col, end, panel.whole});
      }
    }
    Piece again = piece;
    again.panels = unusable.data();
    again.panel_count = static_cast<std::int64_t>(unusable.size());
    over_columns(again, false, SumColumns<decltype(terms.exact())>{terms.exact(), piece.sums});
  }
  reorder<typename Terms::Storage, false>(piece.sums, piece);
}

template <class Terms>
void reduce(Terms terms, const Piece& piece) {
  if (!piece.by_row) {
    over_columns(piece, false, SumColumns<Terms>{terms, piece.sums});
    return finish_column_sums(terms, piece);
  }
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

template <class Terms, class Update, class ScaleOf>
void reduce_and_update_rows(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  std::int64_t start = piece.index[piece.begin] * piece.cols;
  double sum = checked_row_sum(terms, start, piece.cols, Nothing{});
  for (std::int64_t k = piece.begin; k < piece.end; ++k) {
    piece.sums[k] = sum;
    const OfRow<Update> row{update, start, both(scale_of(sum))};
    if (k + 1 == piece.end) return update_row(row, piece.cols);
    start = piece.index[k + 1] * piece.cols;
    sum = checked_row_sum(terms, start, piece.cols, row);
  }
}

// Sums, then an update with a scale made of each group's sum.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  using T = typename Terms::Storage;
  if (piece.by_row) return reduce_and_update_rows(terms, update, piece, scale_of);
  reduce(terms, piece);
  for (std::int64_t p = 0; p < piece.panel_count; ++p) {
    for (std::int64_t col = piece.panels[p].begin; col < piece.panels[p].end; ++col) {
      piece.scales[col] = scale_of(piece.sums[col]);
    }
  }
  reorder<T, true>(piece.scales, piece);
  reorder<T, true>(piece.selected, piece);
  // What was read last is found in the cache.
  over_columns(piece, true, UpdateColumns<Update>{update, piece.scales, {}, piece.selected});
}

// The factor of a group in its gradient. A zero group has gradient zero; a NaN norm fails the comparisons and spreads
// over its group; a norm so small that the quotient has no float32 takes the largest one.
inline float slope_scale(double sum, double strength) {
  if (sum == 0) return 0.0f;
  const double scale = strength / __builtin_sqrt(sum), size = __builtin_fabs(scale);
  if (size > kLargest && std::isfinite(strength)) return static_cast<float>(scale < 0 ? -kLargest : kLargest);
  return static_cast<float>(scale);
}

template <class T>
void penalty_body(const T* w, T* grad, double strength, bool l1, const Piece& piece) {
  const Squares<T> squares{w, piece.offset};
  const Magnitudes<T> magnitudes{w, piece.offset};
  if (grad == nullptr) {
    if (l1) return reduce(magnitudes, piece);
    return reduce(squares, piece);
  }
  if (l1) {
    const AddSigns<T> signs{w, grad, piece.offset};
    return reduce_and_update_all(magnitudes, signs, piece, static_cast<float>(strength));
  }
  reduce_and_update(squares, AddScaled<T>{w, grad, piece.offset}, piece,
                    [=](double sum) { return slope_scale(sum, strength); });
}

template <class T>
void prox_body(T* w, double threshold, bool l1, const Piece& piece) {
  if (l1) return update_all<T>(SoftThreshold<T>{w, piece.offset}, piece, static_cast<float>(threshold));
  reduce_and_update(Squares<T>{w, piece.offset}, Multiply<T>{w, piece.offset}, piece,
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
