#if defined(_WIN32)
#define JFA_BACKEND_EXPORT __declspec(dllexport)
#else
#define JFA_BACKEND_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The one symbol of a plugin, defined by the plugin. Sets *api to a table that lives as long as the library and whose
 * version is the one asked for, or returns JFA_ERROR_UNSUPPORTED_VERSION. Must not start anything: create does.
 */
JFA_BACKEND_EXPORT jfa_status jfa_backend_get_api(uint32_t version, const jfa_backend_api **api);

#ifdef __cplusplus
}
#endif
