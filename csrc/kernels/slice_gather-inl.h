// Bodies of slice_gather, compiled once per instruction set. Columns come as runs of neighbours. Where runs are short
// and the columns ascend, they come as windows of one register whose chosen lanes move together; else one by one.
#include "kernels/common/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

// pack(): the lanes whose bit is set, in order; what follows them may be anything.
#if PYPRUNE_TARGET_WIDTH == 16

constexpr bool kPacks = true;

inline Words pack(Words lanes, std::uint32_t mask) {
  return (Words)_mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), (__m512i)lanes);
}

#elif PYPRUNE_TARGET_WIDTH == 8

constexpr bool kPacks = true;

// For each mask the numbers of its lanes, one byte each.
struct PackOrder {
  std::uint64_t lanes[256];
  constexpr PackOrder() : lanes{} {
    for (int mask = 0; mask < 256; ++mask) {
      int place = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) lanes[mask] |= static_cast<std::uint64_t>(lane) << (8 * place++);
      }
    }
  }
};
constexpr PackOrder kPackOrder;

inline Words pack(Words lanes, std::uint32_t mask) {
  const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kPackOrder.lanes[mask]));
  return (Words)_mm256_permutevar8x32_epi32((__m256i)lanes, _mm256_cvtepu8_epi32(order));
}

#else

constexpr bool kPacks = false;

inline Words pack(Words lanes, std::uint32_t) { return lanes; }

#endif

// How elements travel: one at a time, or as the lanes that get() makes of them and put() stores.
template <class T>
struct Copy {
  static constexpr bool kHasLanes = false;
  void operator()(const T* from, T* to) const { *to = *from; }
};

template <>
struct Copy<float> {
  static constexpr bool kHasLanes = true;
  void operator()(const float* from, float* to) const { *to = *from; }
  Words get(const float* from, std::int64_t count) const { return (Words)load_up_to(from, count); }
  void put(float* to, Words lanes, std::int64_t count) const { store_up_to(to, (Floats)lanes, count); }
};

// Any two bytes: they move as the upper half of a lane, unrounded.
template <>
struct Copy<BFloat16> {
  static constexpr bool kHasLanes = true;
  void operator()(const BFloat16* from, BFloat16* to) const { *to = *from; }
  Words get(const BFloat16* from, std::int64_t count) const { return (Words)load_up_to(from, count); }
  void put(BFloat16* to, Words lanes, std::int64_t count) const {
    if (count >= kWidth) return store_upper_halves(to, lanes);
    BFloat16 padded[kWidth];
    store_upper_halves(padded, lanes);
    for (std::int64_t i = 0; i < count; ++i) to[i] = padded[i];
  }
};

template <class T>
struct Scale {
  static constexpr bool kHasLanes = true;
  float scale;
  float offset;
  void operator()(const T* from, T* to) const { store(to, (load(*from) + offset) * scale - offset); }
  Words get(const T* from, std::int64_t count) const {
    return (Words)((load_up_to(from, count) + spread(offset)) * spread(scale) - spread(offset));
  }
  void put(T* to, Words lanes, std::int64_t count) const { store_up_to(to, (Floats)lanes, count); }
};

// `reach` columns of the source from `first` on; bit k of `mask`: column first + k is taken.
struct Window {
  std::int64_t first;
  std::int64_t reach;
  std::uint32_t mask;
  int taken;
};

// The columns as windows; none where they do not ascend, or are too far from each other to gain by it.
inline std::vector<Window> windows_of(const Gather& gather) {
  std::vector<Window> windows;
  for (std::int64_t j = 0; j < gather.col_count; ++j) {
    const std::int64_t col = gather.cols[j];
    if (j > 0 && col <= gather.cols[j - 1]) return {};
    if (windows.empty() || col >= windows.back().first + kWidth) windows.push_back({col, 0, 0, 0});
    Window& window = windows.back();
    window.mask |= 1u << (col - window.first);
    ++window.taken;
    // A register's worth wherever a later column shows that the row reaches that far.
    const std::int64_t left = gather.cols[gather.col_count - 1] + 1 - window.first;
    window.reach = left < kWidth ? left : kWidth;
  }
  if (gather.col_count < 2 * static_cast<std::int64_t>(windows.size())) windows.clear();
  return windows;
}

template <class T, class Each>
void gather_runs(const T* __restrict row, T* __restrict target, const GatherRun* runs, std::int64_t run_count,
                 const Each& each) {
  for (std::int64_t r = 0; r < run_count; ++r) {
    const T* from = row + runs[r].first;
    for (std::int64_t j = 0; j < runs[r].length; ++j) each(from + j, target + j);
    target += runs[r].length;
  }
}

// Stores may run over into what a later window writes, never beyond the row.
template <class T, class Each>
void gather_windows(const T* row, T* target, std::int64_t count, const std::vector<Window>& windows,
                    const Each& each) {
  for (const Window& window : windows) {
    each.put(target, pack(each.get(row + window.first, window.reach), window.mask), count);
    target += window.taken;
    count -= window.taken;
  }
}

template <class T, class Each>
void gather_rows(const void* w, void* out, const Gather& gather, const GatherRun* runs, std::int64_t run_count,
                 const Each& each, std::int64_t begin, std::int64_t end) {
  std::vector<Window> windows;
  if (kPacks && Each::kHasLanes && runs == nullptr) windows = windows_of(gather);
  for (std::int64_t i = begin; i < end; ++i) {
    const T* row = static_cast<const T*>(w) + (gather.rows == nullptr ? i : gather.rows[i]) * gather.row_stride;
    T* target = static_cast<T*>(out) + i * gather.col_count;
    if (runs != nullptr) {
      gather_runs(row, target, runs, run_count, each);
      continue;
    }
    if constexpr (kPacks && Each::kHasLanes) {
      if (!windows.empty()) {
        gather_windows(row, target, gather.col_count, windows, each);
        continue;
      }
    }
    for (std::int64_t j = 0; j < gather.col_count; ++j) each(row + gather.cols[j], target + j);
  }
}

template <class T>
void gather_copy(const void* w, void* out, const Gather& gather, const GatherRun* runs, std::int64_t run_count,
                 float, float, std::int64_t begin, std::int64_t end) {
  gather_rows<T>(w, out, gather, runs, run_count, Copy<T>{}, begin, end);
}

template <class T>
void gather_scale(const void* w, void* out, const Gather& gather, const GatherRun* runs, std::int64_t run_count,
                  float scale, float offset, std::int64_t begin, std::int64_t end) {
  gather_rows<T>(w, out, gather, runs, run_count, Scale<T>{scale, offset}, begin, end);
}

}  // namespace

GatherKernels gather_kernels() {
  return {{gather_copy<std::uint8_t>, gather_copy<BFloat16>, gather_copy<float>, gather_copy<std::uint64_t>},
          {gather_scale<float>, gather_scale<BFloat16>, gather_scale<Float16>}};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
