/* Tests whether the processor's matrix unit (AMX) can be used. */

#include "amx.h"

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int allowed;

int amx_allowed(void) { return allowed; }

#ifdef WITH_AMX

#define REQUEST_PERMISSION 0x1023 /* arch_prctl's ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

void begin_tiles(int64_t lines, int64_t bytes) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = tile == 4 || tile == 5 ? bytes : LINE;
        shape.lines[tile] = tile < 6 ? lines : bytes / 4;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}

static int product_is_right(void) {
    uint16_t ones[TILE_NUMBERS];
    float sums[PANEL * LANES];
    for (int at = 0; at < TILE_NUMBERS; at++) ones[at] = 0x3f80;
    begin_tiles(PANEL, LINE);
    TILE_ZERO(0);
    TILE_LOAD(4, ones, LINE);
    TILE_LOAD(6, ones, LINE);
    TILE_MULTIPLY(0, 4, 6);
    TILE_STORE(0, sums, LINE);
    TILES_END();
    for (int at = 0; at < PANEL * LANES; at++)
        if (sums[at] != 32) return 0;
    return 1;
}

/* A virtual machine may report AMX and not have it, which kills the process that uses it: a child
 * process tries it first. */
static int works_in_child(void) {
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return 0;
    pid_t child = fork();
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        _exit(product_is_right() ? 0 : 1);
    }
    int status = 1;
    while (child > 0 && waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return 0;
    return child > 0 && status == 0;
}

#else

static int works_in_child(void) { return 0; }

#endif

/* Use AMX from now on if it is `wanted` and works; return whether it is used. */
int64_t allow_amx(int64_t wanted) {
    allowed = wanted && works_in_child();
    return allowed;
}
