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
constexpr int kRegisters = kLanes / kWidth;
// 16-bit rows are compute-bound and gain from having the next row fetched, if both fit into a core's own cache; float32
// rows wait for memory either way, and the extra requests only delay what is needed first.
constexpr std::int64_t kPrefetchBytes = 256 << 10;
// Columns are worked on in panels that stay in the shared cache between the pass for the norms and the product.
constexpr std::int64_t kPanelBytes = 4 << 20;
constexpr int kPanelColumns = 512;
constexpr int kRowsAtOnce = 8;

template <class T>
struct Plain {
  const T* x;
  Floats at(std::int64_t i, std::int64_t count) const { return load_up_to(x + i, count); }
  Plain shifted(std::int64_t offset) const { return {x + offset}; }
  void prefetch(std::int64_t i) const { __builtin_prefetch(x + i); }
};

template <class T>
struct Stepped {
  const T* delta;
  const T* grad;
  float decay;
  float gamma;
  Floats at(std::int64_t i, std::int64_t count) const {
    return load_up_to(delta + i, count) * decay - load_up_to(grad + i, count) * gamma;
  }
  Stepped shifted(std::int64_t offset) const { return {delta + offset, grad + offset, decay, gamma}; }
  void prefetch(std::int64_t i) const {
    __builtin_prefetch(delta + i);
    __builtin_prefetch(grad + i);
  }
};

// Half of the next row is fetched by each of the two passes over this one (see kPrefetchBytes).
template <bool kPrefetch, class Source>
double squared_norm(Source source, std::int64_t count, Source next) {
  Doubles sums[2 * kRegisters] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (kPrefetch) next.prefetch(i / 2);
    for (int j = 0; j < kRegisters; ++j) {
      const Floats value = source.at(i + j * kWidth, kWidth);
      sums[2 * j] = add_square(sums[2 * j], lower(value));
      sums[2 * j + 1] = add_square(sums[2 * j + 1], upper(value));
    }
  }
  double lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int lane = 0; i + lane < count; lane += kWidth) {
    const Floats value = source.at(i + lane, count - i - lane);
    for (int j = 0; j < kWidth && i + lane + j < count; ++j) {
      const double single = value[j];
      lanes[lane + j] += single * single;
    }
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// kNumbers: no element is NaN or infinite. out may be what the source reads: element i is evaluated before it is written, and nothing later needs it.
template <bool kNumbers, bool kPrefetch, class Source, class T>
void multiply(Source source, T* out, std::int64_t count, float scale, Source next) {
  const Floats scales = spread(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (kPrefetch) next.prefetch((count + i) / 2);
    for (int j = 0; j < kLanes; j += kWidth) {
      const Floats product = source.at(i + j, kWidth) * scales;
      if (kNumbers) {
        store_numbers(out + i + j, product);
      } else {
        store_lanes(out + i + j, product);
      }
    }
  }
  for (; i < count; i += kWidth) store_up_to(out + i, source.at(i, count - i) * scales, count - i);
}

template <class Source, class T>
void shrink_rows(Source all, T* out, const GroupRange& range) {
  constexpr bool kPrefetch = sizeof(T) < sizeof(float);
  const bool small = range.cols * static_cast<std::int64_t>(sizeof(T)) <= kPrefetchBytes;
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const Source source = all.shifted(row * range.cols);
    T* target = out + row * range.cols;
    const Source next = small && row + 1 < range.end ? source.shifted(range.cols) : source;
    const double sum = squared_norm<kPrefetch>(source, range.cols, next);
    const float scale = shrink_scale(sum, range.threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      std::memset(target, 0, range.cols * sizeof(T));
      continue;
    }
    if (std::isfinite(sum)) {
      multiply<true, kPrefetch>(source, target, range.cols, scale, next);
    } else {
      multiply<false, kPrefetch>(source, target, range.cols, scale, next);
    }
  }
}

// Squared norms of `width` columns. Every column adds its rows in order, whatever the panel.
template <class Source>
void column_sums(Source panel, const GroupRange& range, int width, double* sums) {
  for (std::int64_t row = 0; row < range.rows; row += kRowsAtOnce) {
    const int rows = static_cast<int>(range.rows - row < kRowsAtOnce ? range.rows - row : kRowsAtOnce);
    const Source block = panel.shifted(row * range.cols);
    for (int col = 0; col < width; col += kWidth) {
      Doubles low = load_lanes(sums + col), high = load_lanes(sums + col + kWidth / 2);
      for (int i = 0; i < rows; ++i) {
        const Floats value = block.at(i * range.cols + col, width - col);
        low = add_square(low, lower(value));
        high = add_square(high, upper(value));
      }
      store_lanes(sums + col, low);
      store_lanes(sums + col + kWidth / 2, high);
    }
  }
}

// Once down for the norms, once up for the product: what was read last is found in the cache.
template <class Source, class T>
void shrink_panel(Source panel, T* out, const GroupRange& range, int width) {
  double sums[kPanelColumns] = {};
  float scales[kPanelColumns] = {};
  column_sums(panel, range, width, sums);
  for (int i = 0; i < width; ++i) scales[i] = shrink_scale(sums[i], range.threshold);
  for (std::int64_t row = range.rows - 1; row >= 0; --row) {
    const Source source = panel.shifted(row * range.cols);
    T* target = out + row * range.cols;
    for (int col = 0; col < width; col += kWidth) {
      const Floats scale = load_lanes(scales + col);
      const Floats product = source.at(col, width - col) * scale;
      store_up_to(target + col, scale == 0.0f ? Floats{} : product, width - col);
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
  for (std::int64_t i = range.begin * range.cols; i < end; i += kWidth) {
    store_up_to(delta + i, source.at(i, end - i), end - i);
  }
}

}  // namespace

template <class T>
GroupKernels<T> group_kernels() {
  return {threshold_body<T>, moreau_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
