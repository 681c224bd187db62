// Bodies of the group soft-threshold and of the Moreau step, compiled once per instruction set. Both are "evaluate
// each element, shrink its group": a source object evaluates element i in float32, and the groups are rows or columns.
// An element is evaluated twice, for the norm and for the product, instead of being stored (and rounded) in between.
// Sums run in double over a fixed number of lanes: squares of float32 can neither overflow nor vanish, and the result
// is the same on every instruction set.
#include "kernels/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = 32;
constexpr int kPairs = kLanes / kPair;
// 16-bit values are squared and summed over this many blocks of lanes (or rows of a column) in float32 before the sum
// goes on in double, which saves most of the conversions. See is_exact_enough().
constexpr int kBlocks = 4;
constexpr std::int64_t kHeadStart = 1024;
// Columns are worked on in panels that stay in the shared cache between the pass for the norms and the product.
constexpr std::int64_t kPanelBytes = 4 << 20;
constexpr int kPanelColumns = 512;
constexpr int kRowsAtOnce = 2 * kBlocks;

template <class T>
struct Plain {
  using Storage = T;
  const T* x;
  Pair at(std::int64_t i) const { return load_pair(x + i); }
  Pair at(std::int64_t i, std::int64_t count) const { return load_pair_up_to(x + i, count); }
  Plain shifted(std::int64_t offset) const { return {x + offset}; }
  void fetch(std::int64_t i) const { fetch_pair<3>(x + i); }
  void fetch_far(std::int64_t i) const { fetch_pair<2>(x + i); }
};

template <class T>
struct Stepped {
  using Storage = T;
  const T* delta;
  const T* grad;
  float decay;
  float gamma;
  Pair at(std::int64_t i) const {
    return load_pair(delta + i) * spread(decay) - load_pair(grad + i) * spread(gamma);
  }
  Pair at(std::int64_t i, std::int64_t count) const {
    return load_pair_up_to(delta + i, count) * spread(decay) - load_pair_up_to(grad + i, count) * spread(gamma);
  }
  Stepped shifted(std::int64_t offset) const { return {delta + offset, grad + offset, decay, gamma}; }
  void fetch(std::int64_t i) const {
    fetch_pair<3>(delta + i);
    fetch_pair<3>(grad + i);
  }
  void fetch_far(std::int64_t i) const {
    fetch_pair<2>(delta + i);
    fetch_pair<2>(grad + i);
  }
};

// Whether float32 could hold the squares that a sum was made of: none was infinite, and none that matters vanished.
inline bool is_exact_enough(double sum) { return sum > 1e-20 && sum < __builtin_inf(); }

// The double lanes of a pair of registers: four registers of half as many lanes.
inline void add_squares(Doubles* sums, Pair value) {
  sums[0] = add_square(sums[0], lower(value.first));
  sums[1] = add_square(sums[1], upper(value.first));
  sums[2] = add_square(sums[2], lower(value.second));
  sums[3] = add_square(sums[3], upper(value.second));
}

inline void add(Doubles* sums, Pair value) {
  sums[0] += lower(value.first);
  sums[1] += upper(value.first);
  sums[2] += lower(value.second);
  sums[3] += upper(value.second);
}

// Sums of squares of a row, in kLanes lanes: element i belongs to lane i % kLanes whatever the register's width is.
template <class Source, bool kWide>
struct RowSum {
  static constexpr int kStep = kWide ? kLanes : kBlocks * kLanes;
  Doubles sums[4 * kPairs] = {};

  // Elements [i, i + kStep), in the order in which `product` (if any) is made of another row's.
  template <class Also>
  void step(Source source, std::int64_t i, const Also& also) {
    for (int pair = 0; pair < kPairs; ++pair) {
      if constexpr (kWide) {
        add_squares(sums + 4 * pair, source.at(i + pair * kPair));
        also(i + pair * kPair);
      } else {
        Pair squares{};
        for (int block = 0; block < kBlocks; ++block) {
          const std::int64_t at = i + block * kLanes + pair * kPair;
          const Pair value = source.at(at);
          squares = block == 0 ? value * value : squares + value * value;
          also(at);
        }
        add(sums + 4 * pair, squares);
      }
    }
  }

  // The lanes and the row's last elements, [i, count), added up in a fixed order.
  double total(Source source, std::int64_t i, std::int64_t count) const {
    using T = typename Source::Storage;
    double unordered[kLanes], lanes[kLanes];
    std::memcpy(unordered, sums, sizeof unordered);
    in_order<T>(unordered, lanes, kLanes);
    for (; i < count; i += kPair) {
      const Pair last = source.at(i, count - i);
      float rest[kPair];
      std::memcpy(rest, &last, sizeof rest);
      for (int k = 0; k < kPair && i + k < count; ++k) {
        const double value = rest[lane_of<T>(k)];
        lanes[(i + k) % kLanes] += value * value;
      }
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  }
};

constexpr auto nothing = [](std::int64_t) {};

template <bool kWide, class Source, class Also>
double sum_of_squares(Source source, std::int64_t count, const Also& also) {
  RowSum<Source, kWide> sum;
  std::int64_t i = 0;
  for (; i + sum.kStep <= count; i += sum.kStep) sum.step(source, i, also);
  return sum.total(source, i, count);
}

template <class Source>
constexpr bool kIsWide = sizeof(typename Source::Storage) == sizeof(float);

template <class Source, class Also>
double squared_norm(Source source, std::int64_t count, const Also& also) {
  const double sum = sum_of_squares<kIsWide<Source>>(source, count, also);
  return kIsWide<Source> || is_exact_enough(sum) ? sum : sum_of_squares<true>(source, count, nothing);
}

// kNumbers: no element of the row is NaN. out may be what the source reads: an element is evaluated before it is written,
// and nothing later needs it.
template <bool kNumbers, class Source, class T, class Also>
void multiply(Source source, T* out, std::int64_t count, float scale, const Also& also) {
  const Floats scales = spread(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int at = 0; at < kLanes; at += kPair) {
      const Pair product = source.at(i + at) * scales;
      if constexpr (kNumbers) {
        store_numbers(out + i + at, product);
      } else {
        store_pair(out + i + at, product);
      }
      also(i + at);
    }
  }
  for (; i < count; i += kPair) store_pair_up_to(out + i, source.at(i, count - i) * scales, count - i);
}

template <class Source, class T>
void shrink_rows(Source all, T* out, const GroupRange& range) {
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const Source source = all.shifted(row * range.cols);
    T* target = out + row * range.cols;
    const Source next = row + 1 < range.end ? source.shifted(range.cols) : source;
    // 16-bit rows fit into a core's own cache twice: half of the next one is fetched in each pass over this one. float32
    // rows only get a head start, because more requests would delay what is needed first.
    const auto early = [&](std::int64_t i) {
      if (sizeof(T) < sizeof(float)) next.fetch_far(i / 2);
    };
    const auto late = [&](std::int64_t i) {
      if (sizeof(T) < sizeof(float)) {
        next.fetch_far((range.cols + i) / 2);
      } else if (i < kHeadStart) {
        next.fetch(i);
      }
    };
    const double sum = squared_norm(source, range.cols, early);
    const float scale = shrink_scale(sum, range.threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      std::memset(target, 0, range.cols * sizeof(T));
    } else if (std::isfinite(sum)) {
      multiply<true>(source, target, range.cols, scale, late);
    } else {
      multiply<false>(source, target, range.cols, scale, late);
    }
  }
}

// Adds the squares of `rows` rows of up to kPair columns to their sums, the rows in order.
template <bool kWide, bool kWhole, class Source>
void add_rows(Source block, std::int64_t stride, int rows, std::int64_t width, bool fetch, double* sums) {
  Doubles totals[4];
  std::memcpy(totals, sums, sizeof totals);
  for (int i = 0; i < rows; i += kWide ? 1 : kBlocks) {
    Pair squares{};
    for (int k = i; k < rows && k < i + (kWide ? 1 : kBlocks); ++k) {
      const Pair value = kWhole ? block.at(k * stride) : block.at(k * stride, width);
      if constexpr (kWide) {
        add_squares(totals, value);
      } else {
        squares = k == i ? value * value : squares + value * value;
      }
      if (fetch) block.fetch_far((k + kRowsAtOnce) * stride);
    }
    if constexpr (!kWide) add(totals, squares);
  }
  std::memcpy(sums, totals, sizeof totals);
}

// Squared norms of `width` columns, in the order of load_pair(). Every column adds its rows in order, whatever the panel.
template <bool kWide, class Source>
void column_sums(Source panel, const GroupRange& range, std::int64_t width, double* sums) {
  std::int64_t row = 0;
  for (; row + kRowsAtOnce <= range.rows; row += kRowsAtOnce) {
    const Source block = panel.shifted(row * range.cols);
    const bool fetch = row + 2 * kRowsAtOnce <= range.rows;
    std::int64_t col = 0;
    for (; col + kPair <= width; col += kPair) {
      add_rows<kWide, true>(block.shifted(col), range.cols, kRowsAtOnce, kPair, fetch, sums + col);
    }
    if (col < width) {
      add_rows<kWide, false>(block.shifted(col), range.cols, kRowsAtOnce, width - col, false, sums + col);
    }
  }
  const Source rest = panel.shifted(row * range.cols);
  for (std::int64_t col = 0; row < range.rows && col < width; col += kPair) {
    add_rows<kWide, false>(rest.shifted(col), range.cols, static_cast<int>(range.rows - row), width - col, false,
                           sums + col);
  }
}

template <class Source>
void squared_norms(Source panel, const GroupRange& range, int width, double* sums) {
  const int padded = (width + kPair - 1) / kPair * kPair;
  std::memset(sums, 0, padded * sizeof(double));
  column_sums<kIsWide<Source>>(panel, range, width, sums);
  if (kIsWide<Source>) return;
  bool exact = width % kPair == 0;  // the lanes beyond the last column hold 0
  for (int i = 0; i < width / kPair * kPair; ++i) exact = exact && is_exact_enough(sums[i]);
  if (exact) return;
  std::memset(sums, 0, padded * sizeof(double));
  column_sums<true>(panel, range, width, sums);
}

// Once down for the norms, once up for the product: what was read last is found in the cache.
template <class Source, class T>
void shrink_panel(Source panel, T* out, const GroupRange& range, int width) {
  double sums[kPanelColumns];
  float scales[kPanelColumns];
  squared_norms(panel, range, width, sums);
  for (int i = 0; i < (width + kPair - 1) / kPair * kPair; ++i) scales[i] = shrink_scale(sums[i], range.threshold);
  for (std::int64_t row = range.rows - 1; row >= 0; --row) {
    const Source source = panel.shifted(row * range.cols);
    T* target = out + row * range.cols;
    for (int col = 0; col < width; col += kPair) {
      const Floats first = load_lanes(scales + col), second = load_lanes(scales + col + kWidth);
      const Pair value = source.at(col, width - col);
      const Pair product{first == 0.0f ? Floats{} : value.first * first,
                         second == 0.0f ? Floats{} : value.second * second};
      store_pair_up_to(target + col, product, width - col);
    }
  }
}

template <class Source, class T>
void shrink_columns(Source all, T* out, const GroupRange& range) {
  const std::int64_t column_bytes = range.rows * static_cast<std::int64_t>(sizeof(T));
  std::int64_t panel = kPanelBytes / column_bytes / kLanes * kLanes;
  panel = panel < kLanes ? kLanes : (panel > kPanelColumns ? kPanelColumns : panel);
  for (std::int64_t col = range.begin; col < range.end; col += panel) {
    const std::int64_t width = range.end - col < panel ? range.end - col : panel;
    shrink_panel(all.shifted(col), out + col, range, static_cast<int>(width));
  }
}

template <class Source, class T>
void shrink_groups(Source source, T* out, const GroupRange& range) {
  if (range.by_row) {
    shrink_rows(source, out, range);
  } else {
    shrink_columns(source, out, range);
  }
}

template <class T>
void threshold_body(const T* x, T* out, const GroupRange& range) {
  shrink_groups(Plain<T>{x}, out, range);
}

template <class T>
void moreau_body(T* delta, const T* grad, float decay, float gamma, const GroupRange& range) {
  const Stepped<T> source{delta, grad, decay, gamma};
  if (range.threshold > 0) return shrink_groups(source, delta, range);
  // Without a threshold the groups do not interact; begin and end count rows.
  const std::int64_t end = range.end * range.cols;
  for (std::int64_t i = range.begin * range.cols; i < end; i += kPair) {
    store_pair_up_to(delta + i, source.at(i, end - i), end - i);
  }
}

}  // namespace

template <class T>
GroupKernels<T> group_kernels() {
  return {threshold_body<T>, moreau_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
