// What the tests of the data room share: folders that clean up after themselves, whole files, the
// message of an expected error, and small data sets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/indexed_dataset.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe {

using testing::contains;
using testing::get_file;
using testing::message_of;
using testing::put_file;
using testing::TempFolder;

// One document per entry, one sequence each.
inline void write_dataset(const std::string& prefix,
                          const std::vector<std::vector<int32_t>>& documents) {
  IndexedDatasetWriter writer(prefix, TokenType::u16, false);
  for (const auto& document : documents) {
    writer.append(document);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
}

}  // namespace troupe
