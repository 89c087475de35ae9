// Flags that say which layers have something: a number, or a list of 0 and 1 with one entry per
// layer, in which lists are joined by "+", repeated by "*N" and grouped by parentheses, as in
// "([0]*3+[1]*58)". Errors are UserErrors that name the flag. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace troupe {

// --moe-layer-freq: which of `layers` layers have experts. N: layer i with i mod N = 0.
std::vector<bool> parse_moe_layer_freq(const std::string& text, int32_t layers);

// --window-attn-skip-freq: which have the window. N: all but layers N - 1, 2 N - 1, ...
std::vector<bool> parse_window_attn_skip_freq(const std::string& text, int32_t layers);

// --linear-attention-freq: which have gated delta nets. N: as for the window.
std::vector<bool> parse_linear_attention_freq(const std::string& text, int32_t layers);

}  // namespace troupe
