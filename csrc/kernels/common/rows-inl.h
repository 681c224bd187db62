// The sum of a row, and the update of its elements. What rows and columns share is in columns-inl.h. For body files:
// see foreach_target.h; no include guard on purpose.
#include "kernels/common/columns-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

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

// Does nothing in addition to the sum.
struct Nothing {
  template <class Extent>
  void operator()(std::int64_t, Extent) const {}
};

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

// The sum of lanes that pairs loaded from T were added to, kLanes of them.
template <class T>
double sum_of_lanes(const Sums* sums) {
  double unordered[kLanes], lanes[kLanes];
  std::memcpy(unordered, sums, sizeof unordered);
  in_order<T>(unordered, lanes, kLanes);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
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
  return sum_of_lanes<typename Terms::Storage>(sums);
}

template <class Terms, class Also>
double checked_row_sum(Terms terms, std::int64_t start, std::int64_t count, Also also) {
  const double sum = row_sum(terms, start, count, also);
  if (Terms::kExact || usable(sum)) return sum;
  return row_sum(terms.exact(), start, count, Nothing{});
}

template <class Update>
void update_row(OfRow<Update> row, std::int64_t count) {  // a copy of the row, which no store can change
  std::int64_t i = 0;
  for (; i + kPair <= count; i += kPair) row(i, Whole{});
  if (i < count) row(i, Part{count - i});
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
