// Packs and describes tags.
#include "ddp/transport/tag.h"

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

constexpr int kPurposeBits = 4, kWrapperBits = 12, kBucketBits = 16;

constexpr char kUnprepared[] = " of a second backward, or one whose forward ran under no_sync(),";

constexpr uint64_t low_bits(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

}  // namespace

uint64_t Tag::word() const {
  uint64_t word = static_cast<uint64_t>(step);
  word = word << kBucketBits | low_bits(bucket, kBucketBits);
  word = word << kWrapperBits | low_bits(wrapper, kWrapperBits);
  return word << kPurposeBits | low_bits(static_cast<uint64_t>(purpose), kPurposeBits);
}

Tag Tag::of(uint64_t word) {
  Tag tag;
  tag.purpose = static_cast<Purpose>(low_bits(word, kPurposeBits));
  tag.wrapper = low_bits(word >>= kPurposeBits, kWrapperBits);
  tag.bucket = low_bits(word >>= kWrapperBits, kBucketBits);
  tag.step = static_cast<int64_t>(word >> kBucketBits);
  return tag;
}

std::string describe(const Tag& tag) {
  const std::string step = text(" in synchronized step ", tag.step);
  switch (tag.purpose) {
    case Purpose::kBucket:
      return text("bucket ", tag.bucket, step);
    case Purpose::kWeightedBucket:
      return text("bucket ", tag.bucket, " of weighted gradients", step);
    case Purpose::kHook:
      return text("bucket ", tag.bucket, " for a communication hook", step);
    case Purpose::kUsedMap:
      return "the map of used parameters" + step;
    case Purpose::kWeights:
      return "the weights" + step;
    case Purpose::kReplicas:
      return "the comparison of replicas" + step;
    case Purpose::kPlan:
      return "the planning of buckets" + step;
    case Purpose::kFromRank0:
      return "rank 0's decision" + step;
    case Purpose::kBuffers:
      return "the broadcast of buffers" + step;
    case Purpose::kAgreement:
      return "the agreement on whether to synchronize, in join()," + step;
    case Purpose::kUnpreparedBucket:
      return text("bucket ", tag.bucket, kUnprepared, step);
    case Purpose::kUnpreparedHook:
      return text("bucket ", tag.bucket, " for a communication hook", kUnprepared, step);
    case Purpose::kGradientCheck:
      return "the check of gradients" + step;
    case Purpose::kChange:
      return text("the comparison of parameter ", tag.bucket,
                  ", which a hook changed during backward to values of checksum ", tag.step, ",");
    case Purpose::kConnection:
      return "the first backward of a copied wrapper, or of one with init_sync=False";
  }
  return "an unknown purpose";
}

std::string describe_difference(const std::string& rank, const std::string& what, const std::string& other_rank,
                                const std::string& other_what) {
  return text("the ranks start different collectives: ", rank, " starts ", what, ", but ", other_rank, " starts ",
              other_what,
              ". Every rank must run the same number of forward and backward passes through the same model. It must "
              "pass a weight or register a hook if another rank does");
}

}  // namespace drivetrain::ddp
