/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Stands in for the CUDA driver and ends the process as soon as anyone loads it. */
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void loaded(void) {
    fprintf(stderr, "the CUDA driver was loaded\n");
    abort();
}
