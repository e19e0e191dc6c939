/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Processes made by fork while other threads of the parent are inside the library: making contexts, writing messages,
 * making the text of a report, starting threads. A child must find nothing locked. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "jfa.h"
#include "util.h"

enum { FORKS = 150, LIMIT = 20 };

static const jfa_api *api;
static atomic_int stop, begun;
static jfa_context *_Atomic shared;

static jfa_context *a_context(const char *backend) {
    jfa_context_options options = {.struct_size = sizeof options, .backend = backend, .memory_space = JFA_MEMORY_HOST};
    jfa_context *context = NULL;
    EXPECT(api->context_create(&options, &context) == JFA_OK);
    return context;
}

static void report(const jfa_context *context) {
    const char *text = NULL;
    EXPECT(api->context_report(context, JFA_REPORT_JSON, &text) == JFA_OK && strstr(text, "\"cpu"));
    EXPECT(api->context_report(context, JFA_REPORT_TEXT, &text) == JFA_OK && strstr(text, "cpu"));
}

/* Everything a child may do with host memory. */
static void work(const char *backend) {
    jfa_context *context = a_context(backend);
    report(context);
    const jfa_problem p = self_attention(1, 8, 1, 64, 1.0f);
    jfa_plan *plan = NULL;
    EXPECT(api->plan_create(context, &p, &plan) == JFA_OK);
    EXPECT(api->plan_release(plan) == JFA_OK && api->context_release(context) == JFA_OK);
}

static void *working(void *backend) {
    while (!stop) {
        work(backend);
    }
    return NULL;
}

/* Makes the texts of the context that the main thread has just made. */
static void *reporting(void *unused) {
    (void)unused;
    while (!stop) {
        const jfa_context *context = shared;
        if (context) {
            begun = 1;
            report(context);
            shared = NULL;
        }
    }
    return NULL;
}

/* Waits for a child, which ends itself when it takes too long. */
static void reap(pid_t child, const char *what, int number) {
    int status = 0;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        const char *how = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "hung" : "failed";
        fprintf(stderr, "%s: child %d %s (status %d)\n", what, number, how, status);
        _exit(1);
    }
}

static void pause_for(long nanoseconds) {
    const struct timespec time = {0, nanoseconds};
    nanosleep(&time, NULL);
}

/* Contexts made, and messages written, by other threads meanwhile. */
static void amid_contexts(void) {
    static char backends[3][8] = {"cpu:1", "cpu:2", "cpu:3"};
    pthread_t threads[3];
    stop = 0;
    for (int i = 0; i < 3; ++i) {
        EXPECT(pthread_create(&threads[i], NULL, working, backends[i]) == 0);
    }
    for (int i = 0; i < FORKS; ++i) {
        pause_for((long)(i * 7919 % 1000) * 1000);
        const pid_t child = fork();
        if (child == 0) {
            alarm(LIMIT);
            work(backends[i % 3]);
            work("cpu:4");
            _exit(0);
        }
        reap(child, "amid contexts", i);
    }
    stop = 1;
    for (int i = 0; i < 3; ++i) {
        pthread_join(threads[i], NULL);
    }
}

/* A text of a handle that another thread is making at that moment. */
static void amid_reports(void) {
    pthread_t thread;
    stop = 0;
    EXPECT(pthread_create(&thread, NULL, reporting, NULL) == 0);
    for (int i = 0; i < FORKS; ++i) {
        jfa_context *context = a_context("cpu:1");
        begun = 0;
        shared = context;
        while (!begun) {
        }
        for (volatile int wait = 0; wait < i * 50; ++wait) {
        }
        const pid_t child = fork();
        if (child == 0) {
            alarm(LIMIT);
            report(context);
            _exit(0);
        }
        reap(child, "amid reports", i);
        while (shared) {
        }
        EXPECT(api->context_release(context) == JFA_OK);
    }
    stop = 1;
    pthread_join(thread, NULL);
}

int main(void) {
    api = jfa_get_api(JFA_API_VERSION);
    amid_contexts();
    amid_reports();
    puts("ok");
    return 0;
}
