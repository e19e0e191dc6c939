/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Loading the library, and computing in host memory with it, opens no CUDA library; loading starts no thread. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdint.h>

#include "jfa.h"

static const char *(*last_error)(void);
#define jfa_last_error last_error
#include "util.h"

static int threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) {
        return -1;
    }
    int count = 0;
    for (struct dirent *e; (e = readdir(tasks));) {
        count += e->d_name[0] != '.';
    }
    closedir(tasks);
    return count;
}

static int mapped(const char *name) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int found = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        found |= strstr(line, name) != NULL;
    }
    if (maps) {
        fclose(maps);
    }
    return found;
}

int main(int argc, char **argv) {
    (void)argc;
    const int before = threads();
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const jfa_api *(*get_api)(uint32_t);
    *(void **)&get_api = dlsym(library, "jfa_get_api");
    *(void **)&last_error = dlsym(library, "jfa_last_error");
    EXPECT(dlsym(library, "jfa_last_error") != NULL && dlsym(library, "rust_eh_personality") == NULL);
    const jfa_api *api = get_api(JFA_API_VERSION);
    EXPECT(api && before == 1 && threads() == 1 && mapped("libjfa") && !mapped("libcuda"));
    jfa_context_options options = {.struct_size = sizeof options, .memory_space = JFA_MEMORY_HOST};
    jfa_context *context = NULL;
    EXPECT(api->context_create(&options, &context) == JFA_OK);
    EXPECT(!mapped("libcuda"));
    EXPECT(api->context_release(context) == JFA_OK);
    /* Threads may still run in it: it stays. */
    EXPECT(dlclose(library) == 0 && mapped("libjfa"));
    puts("ok");
    return 0;
}
