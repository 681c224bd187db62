// Bodies of slice_gather, compiled once per instruction set. Columns come as runs of neighbours; where runs are short,
// element by element.
#include "kernels/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
struct Copy {
  void operator()(const T* from, T* to) const { *to = *from; }
};

template <class T>
struct Scale {
  float scale;
  float offset;
  void operator()(const T* from, T* to) const { store(to, (load(*from) + offset) * scale - offset); }
};

template <class T, class Each>
void gather_rows(const T* __restrict w, T* __restrict out, const Gather& gather, const GatherRun* runs,
                 std::int64_t run_count, const Each& each, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    const T* row = w + (gather.rows == nullptr ? i : gather.rows[i]) * gather.row_stride;
    T* target = out + i * gather.col_count;
    if (runs == nullptr) {
      for (std::int64_t j = 0; j < gather.col_count; ++j) each(row + gather.cols[j], target + j);
      continue;
    }
    for (std::int64_t r = 0; r < run_count; ++r) {
      const T* from = row + runs[r].first;
      for (std::int64_t j = 0; j < runs[r].length; ++j) each(from + j, target + j);
      target += runs[r].length;
    }
  }
}

template <class T>
void gather_copy(const void* w, void* out, const Gather& gather, const GatherRun* runs, std::int64_t run_count,
                 float, float, std::int64_t begin, std::int64_t end) {
  gather_rows(static_cast<const T*>(w), static_cast<T*>(out), gather, runs, run_count, Copy<T>{}, begin, end);
}

template <class T>
void gather_scale(const void* w, void* out, const Gather& gather, const GatherRun* runs, std::int64_t run_count,
                  float scale, float offset, std::int64_t begin, std::int64_t end) {
  const Scale<T> each{scale, offset};
  gather_rows(static_cast<const T*>(w), static_cast<T*>(out), gather, runs, run_count, each, begin, end);
}

}  // namespace

GatherKernels gather_kernels() {
  return {{gather_copy<std::uint8_t>, gather_copy<std::uint16_t>, gather_copy<std::uint32_t>,
           gather_copy<std::uint64_t>},
          {gather_scale<float>, gather_scale<BFloat16>, gather_scale<Float16>}};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
