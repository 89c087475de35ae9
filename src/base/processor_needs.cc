// Compiled as all other code, not as processor.cc: the compiler says here what it may use.
#include "base/processor.h"

namespace troupe {

// In the order of kSets in processor.cc.
constinit const Instructions kNeededInstructions = 0
#ifdef __POPCNT__
                                                   | 1U << 0
#endif
#ifdef __SSE4_2__
                                                   | 1U << 1
#endif
#ifdef __AVX__
                                                   | 1U << 2
#endif
#ifdef __AVX2__
                                                   | 1U << 3
#endif
#ifdef __BMI2__
                                                   | 1U << 4
#endif
#ifdef __FMA__
                                                   | 1U << 5
#endif
#ifdef __AVX512F__
                                                   | 1U << 6
#endif
#ifdef __AVX512BW__
                                                   | 1U << 7
#endif
#ifdef __AVX512DQ__
                                                   | 1U << 8
#endif
#ifdef __AVX512VL__
                                                   | 1U << 9
#endif
    ;

}  // namespace troupe
