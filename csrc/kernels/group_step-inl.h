// Bodies of the group soft-threshold and of the Moreau step, compiled once per instruction set. Both are "evaluate
// each element, shrink its group": a source object evaluates element i in float32, and the groups are rows or columns.
// An element is evaluated twice, for the norm and for the product, instead of being stored (and rounded) in between.
// Sums run in double over a fixed number of lanes: squares of float32 can neither overflow nor vanish, and the result
// is the same on every instruction set.
#include "kernels/columns-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kPairs = kLanes / kPair;
// 16-bit values are squared and summed over this many blocks of lanes in float32 before the sum goes on in double, which
// saves most of the conversions. See usable().
constexpr int kBlocks = 4;

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
  void fetch(std::int64_t i) const {
    fetch_pair<3>(delta + i);
    fetch_pair<3>(grad + i);
  }
  void fetch_far(std::int64_t i) const {
    fetch_pair<2>(delta + i);
    fetch_pair<2>(grad + i);
  }
};

// Sums of squares of a row, in kLanes lanes: element i belongs to lane i % kLanes whatever the register's width is.
template <class Source, bool kWide>
struct RowSum {
  static constexpr int kStep = kWide ? kLanes : kBlocks * kLanes;
  Sums sums[kPairs] = {};

  // Elements [i, i + kStep), in the order in which `product` (if any) is made of another row's.
  template <class Also>
  void step(Source source, std::int64_t i, const Also& also) {
    for (int pair = 0; pair < kPairs; ++pair) {
      if constexpr (kWide) {
        sums[pair].add_squares(source.at(i + pair * kPair, Whole{}));
        also(i + pair * kPair);
      } else {
        Pair squares{};
        for (int block = 0; block < kBlocks; ++block) {
          const std::int64_t at = i + block * kLanes + pair * kPair;
          const Pair value = source.at(at, Whole{});
          squares = block == 0 ? value * value : squares + value * value;
          also(at);
        }
        sums[pair].add(squares);
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
      const Pair last = source.at(i, Part{count - i});
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
  return kIsWide<Source> || usable(sum) ? sum : sum_of_squares<true>(source, count, nothing);
}

// kNumbers: no element of the row is NaN. out may be what the source reads: an element is evaluated before it is written,
// and nothing later needs it.
template <bool kNumbers, class Source, class T, class Also>
void multiply(Source source, T* out, std::int64_t count, float scale, const Also& also) {
  const Floats scales = spread(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int at = 0; at < kLanes; at += kPair) {
      const Pair product = source.at(i + at, Whole{}) * scales;
      if constexpr (kNumbers) {
        store_numbers(out + i + at, product);
      } else {
        store_pair(out + i + at, product);
      }
      also(i + at);
    }
  }
  for (; i < count; i += kPair) store_pair_up_to(out + i, source.at(i, Part{count - i}) * scales, count - i);
}

template <class Source, class T>
void shrink_rows(Source all, T* out, double threshold, const Piece& piece) {
  for (std::int64_t row = piece.begin; row < piece.end; ++row) {
    const Source source = all.shifted(row * piece.cols);
    T* target = out + row * piece.cols;
    const Source next = row + 1 < piece.end ? source.shifted(piece.cols) : source;
    const auto early = [&](std::int64_t i) { fetch_ahead(next, i, piece.cols, true); };
    const auto late = [&](std::int64_t i) { fetch_ahead(next, i, piece.cols, false); };
    const double sum = squared_norm(source, piece.cols, early);
    const float scale = shrink_scale(sum, threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      std::memset(target, 0, piece.cols * sizeof(T));
    } else if (std::isfinite(sum)) {
      multiply<true>(source, target, piece.cols, scale, late);
    } else {
      multiply<false>(source, target, piece.cols, scale, late);
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

template <class T>
void threshold_body(const T* x, T* out, double threshold, const Piece& piece) {
  shrink_groups(Plain<T>{x}, out, threshold, piece);
}

template <class T>
void moreau_body(T* delta, const T* grad, float decay, float gamma, double threshold, const Piece& piece) {
  const Stepped<T> source{delta, grad, decay, gamma};
  if (threshold > 0) return shrink_groups(source, delta, threshold, piece);
  // Without a threshold the groups do not interact; begin and end count rows.
  const std::int64_t end = piece.end * piece.cols;
  std::int64_t i = piece.begin * piece.cols;
  for (; i + kPair <= end; i += kPair) store_pair(delta + i, source.at(i, Whole{}));
  if (i < end) store_pair_up_to(delta + i, source.at(i, Part{end - i}), end - i);
}

}  // namespace

template <class T>
GroupKernels<T> group_kernels() {
  return {threshold_body<T>, moreau_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
