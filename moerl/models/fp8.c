/* E4M3 numbers with one scale a block, to bfloat16: the float32 product, rounded once. See fp8.py, which says the same in torch. */
#include <stdint.h>
#include <string.h>

static inline float number(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#if defined(__x86_64__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* The bits of E4M3, moved to where float32 has them, are the number times 2^-120, also below the normal numbers. */
FOR_EACH_PROCESSOR
static void run(const uint8_t *restrict in, uint16_t *restrict out, int64_t count, float scale) {
    const float lift = 0x1p120f;
    for (int64_t i = 0; i < count; i++) {
        uint32_t code = in[i];
        uint32_t bits = bits_of(number((code & 0x7f) << 20 | (code & 0x80) << 24) * lift * scale);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        uint32_t nan = ((code & 0x7f) == 0x7f) | ((bits & 0x7fffffff) > 0x7f800000);
        out[i] = nan ? 0x7fc0 : rounded;
    }
}

/* A box [rows, columns] whose corner is (top, left) of a matrix with scales [.., scale_columns], one for a block of `high` x `wide`. */
void moerl_dequantize(const uint8_t *in, uint16_t *out, int64_t rows, int64_t columns, int64_t top, int64_t left, const float *scale,
                      int64_t scale_columns, int64_t high, int64_t wide) {
    for (int64_t r = 0; r < rows; r++) {
        const float *line = scale + (top + r) / high * scale_columns;
        for (int64_t c = 0; c < columns;) {
            int64_t block = (left + c) / wide, end = (block + 1) * wide - left;
            if (end > columns)
                end = columns;
            run(in + r * columns + c, out + r * columns + c, end - c, line[block]);
            c = end;
        }
    }
}
