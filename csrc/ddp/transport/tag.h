// Declares tags, which name the purpose of a collective. Needs no torch header.
#pragma once

#include <cstdint>
#include <string>

namespace drivetrain::ddp {

enum class Purpose : uint8_t {
  kBucket = 1,
  kWeightedBucket,
  kHook,
  kUsedMap,
  kWeights,
  kReplicas,
  kPlan,
  kFromRank0,
  kBuffers,
  kAgreement,
  kUnpreparedBucket,  // of a backward that no forward has prepared, such as a second one over its outputs
  kUnpreparedHook,
  kGradientCheck,
  kChange,     // no collective: a parameter that a hook changed during backward, with its checksum in place of the step
  kConnection  // of a wrapper that did not communicate when it was made
};

// Identifies a collective within a job. Ranks give the parts of one collective the same tag.
struct Tag {
  Purpose purpose{};     // 0: unknown
  int64_t step = 0;      // synchronized, from 1
  uint64_t bucket = 0;   // of the purposes of buckets and hooks; the parameter's index for kChange
  uint64_t wrapper = 0;  // counts the wrappers of a process group

  // Packs the tag into a word. Larger numbers lose their high bits.
  uint64_t word() const;
  static Tag of(uint64_t word);
};

std::string describe(const Tag& tag);  // "bucket 3 in synchronized step 7"

// Returns the error of two ranks whose collectives do not belong together. Both are named and described by the caller.
std::string describe_difference(const std::string& rank, const std::string& what, const std::string& other_rank,
                                const std::string& other_what);

}  // namespace drivetrain::ddp
