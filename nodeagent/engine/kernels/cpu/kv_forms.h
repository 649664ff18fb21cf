/* The numbers of the KV pages: fp32, 16 bits, or fp8 (e4m3) with the scale of each head behind it.
 *
 * Pages of another form than fp32 are read into fp32 one block of keys at a time, which all rows
 * under a KV head share.
 */

#ifndef KV_FORMS_H
#define KV_FORMS_H

#include "kernels.h"

/* The first three are those of `enum kind`. */
enum kv_form { KV_FP16 = FP16, KV_BF16 = BF16, KV_FP32 = FP32, KV_FP8 };

#define FP8_MAX 448.0f
#define FP8_NAN 0x7f
#define BF16_NAN 0x7fc0
#define FP32_NORMAL_MIN 0x1p-126f

/* The size of one head of one token. */
INLINED int64_t kv_head_bytes(int64_t form, int64_t dim) {
    return form == KV_FP8 ? dim + 4 : form == KV_FP32 ? 4 * dim : 2 * dim;
}

/* Shifted into the bits of fp16, a number of fp8 is 2^8 times too small, denormal ones too. */
INLINED lanes load_fp8(const uint8_t *at) {
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7f)), 7);
    return (lanes)_mm512_cvtph_ps(_mm256_or_si256(sign, rest)) * 256.0f;
}

/* Read one head of one token. A scale that is not finite makes NaN of every zero. */
INLINED void load_kv_head(int64_t form, const uint8_t *stored, int64_t dim, float *to) {
    if (form == KV_FP8) {
        float scale;
        memcpy(&scale, stored + dim, sizeof(scale));
        for (int64_t at = 0; at < dim; at += LANES)
            *(lanes *)(to + at) = load_fp8(stored + at) * scale;
    } else if (form == KV_BF16)
        for (int64_t at = 0; at < dim; at += LANES)
            *(lanes *)(to + at) = load_fp32(BF16, stored + 2 * at);
    else
        for (int64_t at = 0; at < dim; at += LANES)
            *(lanes *)(to + at) = load_fp32(FP16, stored + 2 * at);
}

/* Round numbers of at most FP8_MAX to the nearest of fp8, ties to even. */
INLINED __m128i round_to_fp8(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), sign = _mm512_srli_epi32(bits, 31);
    __m512 size = _mm512_abs_ps(x);
    __m512i normal = _mm512_castps_si512(size);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(normal, 20), _mm512_set1_epi32(1));
    normal = _mm512_add_epi32(_mm512_add_epi32(normal, _mm512_set1_epi32(0x7ffff)), odd);
    /* The bias of exponents is 127 in fp32 and 7 in fp8. */
    normal = _mm512_srli_epi32(_mm512_sub_epi32(normal, _mm512_set1_epi32(120 << 23)), 20);
    /* The last bit of 2^14 is 2^-9, which is the smallest number of fp8. */
    __m512i small = _mm512_castps_si512(_mm512_add_ps(size, _mm512_set1_ps(0x1p14f)));
    small = _mm512_sub_epi32(small, _mm512_castps_si512(_mm512_set1_ps(0x1p14f)));
    __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
    __m512i rounded = _mm512_mask_blend_epi32(is_small, normal, small);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(FP8_NAN));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(rounded, _mm512_slli_epi32(sign, 7)));
}

INLINED __m256i round_to_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_srli_epi32(rounded, 16);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(BF16_NAN));
    return _mm512_cvtepi32_epi16(rounded);
}

/* Store one head in fp8, with the scale that makes its largest number the largest of fp8. */
INLINED void store_fp8_head(const float *from, int64_t dim, uint8_t *stored) {
    __m512 largest = _mm512_setzero_ps();
    int is_nan = 0;
    for (int64_t at = 0; at < dim; at += LANES) {
        __m512 x = _mm512_loadu_ps(from + at);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
        is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    float scale = _mm512_reduce_max_ps(largest) / FP8_MAX;
    if (scale < FP32_NORMAL_MIN) scale = FP32_NORMAL_MIN;
    /* The maximum may pass over NaN; the scale must not. */
    if (is_nan) scale = NAN;
    for (int64_t at = 0; at < dim; at += LANES) {
        __m512 x = _mm512_div_ps(_mm512_loadu_ps(from + at), _mm512_set1_ps(scale));
        _mm_storeu_si128((__m128i *)(stored + at), round_to_fp8(x));
    }
    memcpy(stored + dim, &scale, sizeof(scale));
}

INLINED void store_kv_head(int64_t form, const float *from, int64_t dim, uint8_t *stored) {
    if (form == KV_FP8)
        store_fp8_head(from, dim, stored);
    else if (form == KV_FP32)
        memcpy(stored, from, dim * sizeof(float));
    else
        for (int64_t at = 0; at < dim; at += LANES) {
            __m512 x = _mm512_loadu_ps(from + at);
            __m256i bits = form == KV_BF16 ? round_to_bf16(x)
                                           : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
            _mm256_storeu_si256((__m256i *)(stored + 2 * at), bits);
        }
}

#endif
