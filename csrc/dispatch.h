// Which instruction set the kernels run on. Detected once; tests may choose a lower one.
#pragma once

#include <string>
#include <vector>

// The x86 variants need GCC's or Clang's target attributes. Everything else runs the lowest bodies, which are compiled
// for the baseline of the platform.
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define PYPRUNE_X86 1
#else
#define PYPRUNE_X86 0
#endif

namespace pyprune {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };
constexpr int kIsaCount = 3;

// "neon", "avx2", "avx512" or "scalar": the lowest one is called what its instructions are, "neon" on 64-bit ARM.
const char* isa_name(Isa isa);

// Lowest first; the lowest one is always there.
std::vector<Isa> available_isas();

// The best available one, unless set_isa() chose another.
Isa active_isa();

// Throws std::invalid_argument for a name that is unknown or that this CPU cannot run. "auto" restores the best.
void set_isa(const std::string& name);

// The value of an expression in the namespace of each instruction set, as the entries of an IsaTable; where an
// instruction set was not compiled, the scalar one's.
#if PYPRUNE_X86
#define PYPRUNE_EACH_ISA(...) {{scalar::__VA_ARGS__, avx2::__VA_ARGS__, avx512::__VA_ARGS__}}
#else
#define PYPRUNE_EACH_ISA(...) {{scalar::__VA_ARGS__, scalar::__VA_ARGS__, scalar::__VA_ARGS__}}
#endif

// One entry for each instruction set, filled at compile time.
template <class Kernel>
struct IsaTable {
  Kernel entry[kIsaCount];
  Kernel active() const { return entry[static_cast<int>(active_isa())]; }
};

}  // namespace pyprune
