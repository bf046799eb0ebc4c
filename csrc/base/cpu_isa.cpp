// Detects the processor's instruction sets and caches the choice.
#include "base/cpu_isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/check.h"

namespace drivetrain {
namespace {

constexpr int kUndecided = -1;
std::atomic<int> chosen{kUndecided};

std::string joined_names(const std::vector<Isa>& isas) {
  std::string names;
  for (Isa isa : isas) names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  return names;
}

Isa parse(const std::string& name) {
  const std::vector<Isa> available = available_isas();
  for (Isa isa : available) {
    if (name == name_of(isa)) return isa;
  }
  throw UserError(text("DRIVETRAIN_ISA is '", name, "', but this processor offers: ", joined_names(available),
                       ". Set it to one of these, or unset it for the fastest."));
}

Isa decide() {
  const char* wanted = std::getenv("DRIVETRAIN_ISA");
  if (wanted != nullptr && *wanted != '\0') return parse(wanted);
  return available_isas().back();
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas = {Isa::kBaseline};
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2) isas.push_back(Isa::kAvx2);
  if (avx2 && avx512) isas.push_back(Isa::kAvx512);
  return isas;
}

Isa chosen_isa() {
  int isa = chosen.load(std::memory_order_relaxed);
  if (isa == kUndecided) {
    isa = static_cast<int>(decide());
    chosen.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

void force_isa(const std::string& name) {
  chosen.store(name.empty() ? kUndecided : static_cast<int>(parse(name)), std::memory_order_relaxed);
}

}  // namespace drivetrain
