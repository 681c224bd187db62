// Sums and updates of columns, for body files: see foreach_target.h; no include guard on purpose. The sums run down the
// matrix and the update runs up again, over whole pieces of rows: narrow panels, which would stay in the cache, touch a
// new page every few hundred bytes and cost more than they save.
//
// Terms say what is summed. kArrays: how many arrays that reads. Exact terms join their lanes' sums in double, one by
// one. The others are for 16-bit storage, whose conversion to double costs more than memory takes to deliver: the terms
// are made in float32, where the square or product of two such numbers is exact, and kChain of them are added there
// first, which costs a sum at most 2e-7 of itself. That fails beyond the range of float32; usable() tells, and the sum
// is made of exact terms then. An update returns the new elements of its `out`, given one scale a lane.
#include "kernels/common/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = kColumnBlock;
// Columns: this many streams from memory at once, and rows in blocks that no chain of sums crosses.
constexpr int kStreams = 8;
constexpr int kChainRows = 4;

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

// Checks that a sum of inexact terms has the precision of float32, whatever the number of terms.
inline bool usable(double sum) {
  const double magnitude = __builtin_fabs(sum);
  return magnitude > 1e-30 && magnitude < 1e38;
}

// Chosen, not multiplied: what is removed is exactly +0, whatever it was.
inline Floats scaled(Floats value, Floats scale) { return select((Words)(scale == 0.0f), Floats{}, value * scale); }
inline Pair scaled(Pair value, Pair scale) {
  return {scaled(value.first, scale.first), scaled(value.second, scale.second)};
}

// The squares of what a source evaluates.
template <class Source, bool kExactly = sizeof(typename Source::Storage) == sizeof(float)>
struct Squares {
  using Storage = typename Source::Storage;
  static constexpr int kArrays = Source::kArrays;
  static constexpr bool kExact = kExactly;
  static constexpr int kChain = kExact ? 1 : kChainRows;
  Source source;
  Squares<Source, true> exact() const { return {source}; }
  template <class Extent>
  Pair term(std::int64_t i, Extent extent) const {
    const Pair value = source.at(i, extent);
    return value * value;
  }
  template <class Extent>
  void add(std::int64_t i, Extent extent, Sums* sums) const {
    sums->add_squares(source.at(i, extent));
  }
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

// Calls work(rows, panel, col, extent) on every pair of selected columns of some rows at a time: several rows share
// what is known of the columns, and keep several streams from memory going. `up` begins at the last row.
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

// scales: one a column in the order of lanes; or null, then `scale` is every column's.
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

// Makes the sums of columns what they must be, and puts them in order. Each block of columns decides alone whether its
// sums are usable, so that nothing depends on how the columns are shared between threads.
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
void reduce_columns(Terms terms, const Piece& piece) {
  over_columns(piece, false, SumColumns<Terms>{terms, piece.sums});
  finish_column_sums(terms, piece);
}

// Sums, and a scale made of each, for an update in the order of lanes.
template <class Terms, class ScaleOf>
void reduce_to_column_scales(Terms terms, const Piece& piece, ScaleOf scale_of) {
  using T = typename Terms::Storage;
  reduce_columns(terms, piece);
  for (std::int64_t p = 0; p < piece.panel_count; ++p) {
    for (std::int64_t col = piece.panels[p].begin; col < piece.panels[p].end; ++col) {
      piece.scales[col] = scale_of(piece.sums[col]);
    }
  }
  reorder<T, true>(piece.scales, piece);
  reorder<T, true>(piece.selected, piece);
}

// Sums, then an update with a scale made of each column's sum.
template <class Terms, class Update, class ScaleOf>
void reduce_and_update_columns(Terms terms, Update update, const Piece& piece, ScaleOf scale_of) {
  reduce_to_column_scales(terms, piece, scale_of);
  // Backwards: the rows that were read last are in the cache.
  over_columns(piece, true, UpdateColumns<Update>{update, piece.scales, {}, piece.selected});
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
