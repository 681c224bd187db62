// Headers of the platform for simd-inl.h. Included by an op's .cpp before foreach_target.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dispatch.h"
#include "kernels/common/storage.h"

#if PYPRUNE_X86
#include <immintrin.h>
#endif
