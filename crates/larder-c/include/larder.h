/* larder: Mixture-of-Experts models bigger than memory. Written by cbindgen from crates/larder-c/src/lib.rs.
 *
 *   cc program.c -llarder
 *
 * Strings are UTF-8 and end with NUL, paths are in the system's encoding. All functions may be called from any thread. */

#ifndef LARDER_H
#define LARDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 A model that is loaded. Functions that are given the same one from several threads wait for each other.
 */
typedef struct larder_model larder_model;

/*
 Receives a piece of the answer: UTF-8 of `length` bytes, with a NUL behind it, valid during the call. Returning
 false ends the answer.
 */
typedef bool (*larder_text_fn)(const char *text, size_t length, void *user_data);

/*
 An image: the content of a PNG, JPEG, WebP or GIF file.
 */
typedef struct larder_image {
  /*
   Its bytes.
   */
  const uint8_t *data;
  /*
   How many there are.
   */
  size_t length;
} larder_image;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 The version of the library, as in "0.1.0". Not to be freed.
 */
const char *larder_version(void);

/*
 Loads a model: a store, a folder with a checkpoint, or a GGUF file, beside which a store is made the first time.

 `options` is a JSON object or NULL: "cache" ("4G", "16x", "all" or "auto"), "context", "threads", "quality",
 "routing", "eviction", "vision" and all other settings of docs/configuration.md by their names, and "models", the
 folder of downloaded models.

 Returns NULL on an error; `error`, if it is not NULL, then gets a sentence, to be freed by larder_string_free.

 # Safety

 `path` is a string; `options` is a string or NULL; `error` is NULL or where a pointer may be written.
 */
struct larder_model *larder_load(const char *path, const char *options, char **error);

/*
 Generates what follows a prompt, from an empty context.

 `options` is a JSON object or NULL: "max-tokens" (256), "temperature", "top-k", "top-p", "min-p",
 "repetition-penalty", "seed", "stop" (a list of strings), "ignore-eos". Sampling that is left out is as the model's
 files recommend. `on_text` may be NULL.

 Returns a JSON object, to be freed by larder_string_free: "text", "tokens", "finish" ("end-of-text", "stop-string",
 "length", "context" or "cancelled"), "prompt-tokens", "prefill-seconds", "decode-seconds". Returns NULL on an error,
 as larder_load does; the model stays usable.

 # Safety

 `model` is from larder_load; `prompt` is a string; `options` is a string or NULL; `error` is NULL or where a pointer
 may be written.
 */
char *larder_generate(const struct larder_model *model,
                      const char *prompt,
                      const char *options,
                      larder_text_fn on_text,
                      void *user_data,
                      char **error);

/*
 As larder_generate, behind images: with the prompt they are a message of the model's chat template, if it has one.
 A model that does not see refuses them.

 # Safety

 As larder_generate; `images` are `image_count` images, or NULL if there are none, and the `data` of each has
 `length` bytes.
 */
char *larder_generate_with_images(const struct larder_model *model,
                                  const char *prompt,
                                  const struct larder_image *images,
                                  size_t image_count,
                                  const char *options,
                                  larder_text_fn on_text,
                                  void *user_data,
                                  char **error);

/*
 Counts since the model was loaded, as a JSON object, to be freed by larder_string_free: "slots", "hits",
 "in-flight-hits", "misses", "evictions", "hit-rate", "read-bytes", "wait-seconds", "compute-seconds",
 "measured-tokens", "output-kl". NULL on an error.

 # Safety

 `model` is from larder_load; `error` is NULL or where a pointer may be written.
 */
char *larder_stats(const struct larder_model *model, char **error);

/*
 Frees a string that the library returned; NULL is fine.

 # Safety

 `text` is such a string, not yet freed, or NULL.
 */
void larder_string_free(char *text);

/*
 Frees a model; NULL is fine.

 # Safety

 `model` is from larder_load, not yet freed and in use by no thread, or NULL.
 */
void larder_free(struct larder_model *model);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LARDER_H */
