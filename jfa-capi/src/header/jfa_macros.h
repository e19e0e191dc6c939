
@VERSION@

/* The status of a call must be looked at: for functions, and in C++ for the type itself. */
#if defined(__GNUC__) || defined(__clang__)
#define JFA_MUST_USE __attribute__((warn_unused_result))
#else
#define JFA_MUST_USE
#endif
#if defined(__cplusplus) && __cplusplus >= 201703L
#define JFA_MUST_USE_TYPE [[nodiscard]]
#else
#define JFA_MUST_USE_TYPE
#endif

#if defined(__cplusplus)
#define JFA_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define JFA_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

/* Whether the library at hand has a function that was added to the table after its first version. */
#define JFA_HAS(api, function) ((api)->struct_size >= offsetof(jfa_api, function) + sizeof((api)->function))
