// Detects the processor's instruction sets and caches the choice.
#include "base/cpu_isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/check.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace drivetrain {
namespace {

#if defined(__aarch64__)
constexpr const char* kNames[] = {"baseline", "armv8_2", "sve"};
#else
constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
#endif

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

const char* name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<Isa> available_isas() {
#if defined(__aarch64__)
  constexpr unsigned long kOfSecond = HWCAP_CRC32 | HWCAP_ATOMICS | HWCAP_ASIMDRDM;
  constexpr unsigned long kOfThird = HWCAP_FPHP | HWCAP_ASIMDHP | HWCAP_SVE;
  const auto has = [found = ::getauxval(AT_HWCAP)](unsigned long all) { return (found & all) == all; };
  const bool second = has(kOfSecond), third = has(kOfThird);
#else
  const bool second = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool third = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  std::vector<Isa> isas = {Isa::kBaseline};
  if (second) isas.push_back(Isa::kSecond);
  if (second && third) isas.push_back(Isa::kThird);
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
