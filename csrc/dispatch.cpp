#include "dispatch.h"

#include <atomic>
#include <stdexcept>

#if PYPRUNE_X86
#include <cpuid.h>
#endif

namespace pyprune {
namespace {

#if PYPRUNE_X86
// Asked of the CPU itself: not every supported compiler knows the name "f16c".
bool cpu_has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

bool cpu_has_avx2() {
#if PYPRUNE_X86
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if PYPRUNE_X86
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Isa best_isa() {
  static const Isa best = cpu_has_avx512() ? Isa::kAvx512 : cpu_has_avx2() ? Isa::kAvx2 : Isa::kScalar;
  return best;
}

// The lowest bodies are vectors of four lanes, compiled for the baseline of the platform. Every 64-bit ARM has NEON, and
// these vectors become its instructions. 32-bit ARM does not count: its NEON flushes subnormal numbers, so compilers do
// such arithmetic on single numbers there.
#if defined(__aarch64__) && defined(__ARM_NEON)
constexpr const char* kBaselineName = "neon";
#else
constexpr const char* kBaselineName = "scalar";
#endif

constexpr int kAutomatic = -1;
std::atomic<int> chosen{kAutomatic};

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    default:
      return kBaselineName;
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) isas.push_back(static_cast<Isa>(i));
  return isas;
}

Isa active_isa() {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa == kAutomatic ? best_isa() : static_cast<Isa>(isa);
}

void set_isa(const std::string& name) {
  if (name == "auto") {
    chosen.store(kAutomatic, std::memory_order_relaxed);
    return;
  }
  std::string allowed = "auto";
  for (Isa isa : available_isas()) {
    if (name == isa_name(isa)) {
      chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
      return;
    }
    allowed += std::string(", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available here; choose one of: " + allowed);
}

}  // namespace pyprune
