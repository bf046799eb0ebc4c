// Tests the checkpoint writer and reader without torch: checksums, strided copies, snapshots on several threads.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "checkpointing/crc32c.h"
#include "checkpointing/file.h"
#include "checkpointing/reader.h"
#include "checkpointing/slab.h"
#include "checkpointing/snapshot.h"
#include "checkpointing/strided_bytes.h"
#include "native_tests.h"

namespace {

using namespace drivetrain;
using namespace drivetrain::checkpointing;

constexpr double kLimitS = 60;

std::vector<unsigned char> drawn_bytes(int64_t size, uint32_t seed) {
  std::vector<unsigned char> bytes(size);
  uint32_t state = seed * 2654435761u + 1;
  for (unsigned char& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return bytes;
}

// The definition, one bit at a time.
uint32_t reference_crc32c(const unsigned char* bytes, int64_t size) {
  uint32_t state = ~uint32_t{0};
  for (int64_t i = 0; i < size; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78u : 0);
  }
  return ~state;
}

void test_checksums() {
  for (const Isa isa : available_isas()) {
    force_isa(name_of(isa));
    const std::string name = name_of(isa);
    expect(crc32c(0, "123456789", 9) == 0xE3069283, name + ": CRC32C has its published check value");
    for (const int64_t size : {0, 1, 7, 8, 9, 3071, 3072, 3073, 12 << 10, 100003}) {
      for (const int64_t offset : {0, 1, 3}) {
        // The block ends with the bytes, so that the address sanitizer sees a read beyond them.
        const std::vector<unsigned char> bytes = drawn_bytes(size + offset, static_cast<uint32_t>(size));
        const uint32_t expected = reference_crc32c(bytes.data() + offset, size);
        expect(crc32c(0, bytes.data() + offset, size) == expected, name + ": CRC32C of " + std::to_string(size));
        for (int64_t at = 0; at < 9; at += 3) {  // the target may begin at any address
          std::vector<unsigned char> copy(size + 9, 0xA5);
          const uint32_t found = copy_crc32c(0, copy.data() + at, bytes.data() + offset, size);
          expect(found == expected, name + ": CRC32C of a copy");
          expect(std::equal(bytes.begin() + offset, bytes.begin() + offset + size, copy.begin() + at), name + ": copy");
          const auto is_kept = [](unsigned char byte) { return byte == 0xA5; };
          expect(std::all_of(copy.begin(), copy.begin() + at, is_kept), name + ": bytes before the copy");
          expect(std::all_of(copy.begin() + at + size, copy.end(), is_kept), name + ": bytes after the copy");
        }
        const int64_t half = size / 2;
        const uint32_t first = crc32c(0, bytes.data() + offset, half);
        expect(crc32c(first, bytes.data() + offset + half, size - half) == expected, name + ": CRC32C in two parts");
      }
    }
  }
  force_isa("");
}

void test_strides() {
  // A 3 x 4 x 5 array of 4-byte elements, with its dimensions in every order and every second element of the last.
  const std::vector<unsigned char> bytes = drawn_bytes(3 * 4 * 5 * 4, 1);
  const std::vector<std::vector<int64_t>> orders = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  const int64_t sizes[] = {3, 4, 3}, strides[] = {80, 20, 8};
  for (const std::vector<int64_t>& order : orders) {
    std::vector<int64_t> size, stride;
    for (const int64_t dim : order) {
      size.push_back(sizes[dim]);
      stride.push_back(strides[dim]);
    }
    std::vector<unsigned char> expected;
    for (int64_t i = 0; i < size[0]; ++i) {
      for (int64_t j = 0; j < size[1]; ++j) {
        for (int64_t k = 0; k < size[2]; ++k) {
          const unsigned char* item = bytes.data() + i * stride[0] + j * stride[1] + k * stride[2];
          expected.insert(expected.end(), item, item + 4);
        }
      }
    }
    const StridedBytes array(bytes.data(), 4, size, stride);
    expect(array.size() == static_cast<int64_t>(expected.size()), "bytes of a strided array");
    for (int64_t begin = 0; begin <= array.size(); begin += 4) {
      for (int64_t end = begin; end <= array.size(); end += 4) {
        std::vector<unsigned char> found(end - begin);
        array.copy(found.data(), begin, end);
        expect(std::equal(found.begin(), found.end(), expected.begin() + begin), "a part of a strided array");
      }
    }
  }
  const StridedBytes scalar(bytes.data(), 4, {}, {});
  expect(scalar.size() == 4 && scalar.is_contiguous(), "a strided array of no dimension");
  const StridedBytes merged(bytes.data(), 4, {3, 4, 1, 5}, {80, 20, 7, 4});
  expect(merged.is_contiguous(), "dimensions that continue each other are merged");
  const StridedBytes repeated(bytes.data(), 4, {6}, {0});
  std::vector<unsigned char> found(24);
  repeated.copy(found.data(), 0, 24);
  for (int i = 0; i < 6; ++i) expect(std::memcmp(found.data() + 4 * i, bytes.data(), 4) == 0, "a stride of 0");
}

Source source_of(std::shared_ptr<std::vector<unsigned char>> bytes) {
  const auto size = static_cast<int64_t>(bytes->size());
  return {StridedBytes(bytes->data(), 1, {size}, {1}), std::move(bytes)};
}

void test_round_trip(const std::string& folder, bool direct) {
  const auto slab = std::make_shared<SnapshotSlab>();
  const std::string header(kBlockBytes, ' ');
  for (int round = 0; round < 3; ++round) {
    const std::string path = folder + "/file-" + std::to_string(direct) + std::to_string(round);
    std::vector<std::shared_ptr<std::vector<unsigned char>>> tensors;
    std::vector<Source> sources;
    for (const int64_t size : {9 << 20, 0, 5, (4 << 20) + 1, 1, 12345}) {
      tensors.push_back(std::make_shared<std::vector<unsigned char>>(drawn_bytes(size, round)));
      sources.push_back(source_of(tensors.back()));
    }
    std::vector<uint32_t> checksums;
    {
      Snapshot snapshot(*slab, header, std::move(sources));
      snapshot.write(path, direct);
      expect(snapshot.wait_copied(kLimitS), "a snapshot is copied");
      expect(snapshot.copy_seconds() >= 0, "a snapshot knows how long it was copied");
      for (const auto& tensor : tensors) expect(tensor.use_count() == 1, "a copied tensor is released");
      expect(snapshot.wait_written(kLimitS), "a snapshot is written");
      checksums = snapshot.checksums();
    }
    std::vector<std::vector<unsigned char>> found;
    ReadJob job{path, 0, {}, checksums, {}};
    int64_t at = kBlockBytes;
    for (const auto& tensor : tensors) found.emplace_back(tensor->size());
    for (auto& bytes : found) {
      const auto size = static_cast<int64_t>(bytes.size());
      if (size > 0) job.targets.push_back({at, bytes.data(), size, nullptr});
      at += size;
    }
    job.file_bytes = at;
    job.chunks.resize(checksums.size());
    std::iota(job.chunks.begin(), job.chunks.end(), 0);
    struct stat facts;
    expect(::stat(path.c_str(), &facts) == 0 && facts.st_size == at, "a file has the size of its tensors");
    const auto bad = CheckpointReader(job, 3).wait(kLimitS);
    expect(bad && bad->empty(), "the checksums of a file hold");
    for (size_t i = 0; i < tensors.size(); ++i) expect(found[i] == *tensors[i], "a tensor is read as it was written");

    std::FILE* file = std::fopen(path.c_str(), "r+b");
    std::fseek(file, (4 << 20) + 5, SEEK_SET);
    const int byte = std::fgetc(file);
    std::fseek(file, (4 << 20) + 5, SEEK_SET);
    std::fputc(byte ^ 16, file);
    std::fclose(file);
    const auto flipped = CheckpointReader(job, 2).wait(kLimitS);
    expect(flipped && flipped->size() == 1 && (*flipped)[0].first == 1, "a flipped bit is found in its chunk");
    expect(::truncate(path.c_str(), at - 1) == 0, "truncate");
    const auto cut = CheckpointReader(job, 2).wait(kLimitS);
    expect(cut && cut->size() == 2, "a file that was cut off is found");
    ::unlink(path.c_str());
  }
}

void test_failures(const std::string& folder) {
  const auto slab = std::make_shared<SnapshotSlab>();
  const std::string header(kBlockBytes, ' ');
  const auto tensor = std::make_shared<std::vector<unsigned char>>(drawn_bytes(1 << 20, 7));
  {
    Snapshot snapshot(*slab, header, {source_of(tensor)});
    int code = 0;
    try {
      snapshot.write(folder + "/absent/file");
    } catch (const FileError& error) {
      code = error.code();
    }
    expect(code == ENOENT, "a file in an absent folder is an error");
    bool is_refused = false;
    try {
      Snapshot(*slab, header, {source_of(tensor)});
    } catch (const EnvironmentError&) {
      is_refused = true;
    }
    expect(is_refused, "two snapshots in one slab are refused");
    expect(snapshot.wait_copied(kLimitS), "a snapshot whose file failed is copied");
  }
  int code = 0;
  try {
    CheckpointReader(ReadJob{folder + "/absent", 1, {0}, {}, {}}, 1).wait(kLimitS);
  } catch (const FileError& error) {
    code = error.code();
  }
  expect(code == ENOENT, "reading an absent file is an error");
}

}  // namespace

void drivetrain::test_checkpointing() {
  test_checksums();
  test_strides();
  char folder[] = "/tmp/drivetrain-native-XXXXXX";
  expect(::mkdtemp(folder) != nullptr, "mkdtemp");
  for (const bool direct : {true, false}) test_round_trip(folder, direct);
  test_failures(folder);
  ::rmdir(folder);
}
