// Numbers for people, always with their unit.
#pragma once

#include <cstdint>
#include <string>

namespace troupe {

std::string format_bytes(uint64_t bytes);  // "1.25 MiB"
std::string format_count(double count);    // "3.2 M", "14.1 k", "950"
std::string format_duration(
    double seconds);  // "1 h 02 min", "12.4 s", "1.23 s", "8.1 ms", "12.3 us"

}  // namespace troupe
