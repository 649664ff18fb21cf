/* Forced into llama.cpp's build. The AMX intrinsics of gcc before 13 do not say that they read a
 * tile's memory, so that the compiler drops or delays the stores before them and the server
 * crashes. */

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13

#include <immintrin.h>

#undef _tile_loadd
#undef _tile_loadd_internal
#define _tile_loadd_internal(tile, from, apart)                                                    \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(from)),               \
                     "r"((long)(apart))                                                            \
                     : "memory")
#define _tile_loadd(tile, from, apart) _tile_loadd_internal(tile, from, apart)
#define _tile_loadconfig(from) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(from)))

#endif
