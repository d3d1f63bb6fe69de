/* Loads a model, prints the answer to a prompt as it is generated, and then what the expert cache did.
 *
 *   cargo build --release -p larder-c
 *   cc -Icrates/larder-c/include examples/c/generate.c -Ltarget/release -llarder -o generate
 *   LD_LIBRARY_PATH=target/release ./generate models/demo "The old man looked at the door, and" '{"cache": "16x"}'
 *
 * A model that sees also takes images: ./generate MODEL "What is this?" "{}" "{}" photo.jpg
 */
#include <larder.h>
#include <stdio.h>
#include <stdlib.h>

static bool print_text(const char *text, size_t length, void *user_data) {
    size_t *bytes = user_data;
    *bytes += length;
    fwrite(text, 1, length, stdout);
    fflush(stdout);
    return true; /* false ends the answer */
}

/* Prints a sentence that the library returned, and ends the program. */
static int fail(char *error) {
    fprintf(stderr, "generate: %s\n", error ? error : "unknown error");
    larder_string_free(error);
    return EXIT_FAILURE;
}

/* Reads a file; ends the program if there is none. */
static larder_image read_image(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    long length = ftell(file);
    unsigned char *data = length > 0 ? malloc((size_t)length) : NULL;
    rewind(file);
    if (!data || fread(data, 1, (size_t)length, file) != (size_t)length) {
        fprintf(stderr, "generate: %s cannot be read\n", path);
        exit(EXIT_FAILURE);
    }
    fclose(file);
    return (larder_image){.data = data, .length = (size_t)length};
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: generate MODEL PROMPT [LOAD-OPTIONS [GENERATE-OPTIONS [IMAGE...]]]\n");
        return 2;
    }
    larder_image *images = calloc((size_t)count, sizeof *images);
    size_t image_count = 0;
    for (int at = 5; images && at < count; at++) images[image_count++] = read_image(arguments[at]);

    char *error = NULL;
    larder_model *model = larder_load(arguments[1], count > 3 ? arguments[3] : NULL, &error);
    if (!model) return fail(error);

    /* Without images, larder_generate is the same. */
    size_t bytes = 0;
    const char *options = count > 4 ? arguments[4] : "{\"max-tokens\": 40}";
    char *answer = larder_generate_with_images(model, arguments[2], images, image_count, options, print_text, &bytes, &error);
    for (size_t at = 0; at < image_count; at++) free((void *)images[at].data);
    free(images);
    if (!answer) {
        larder_free(model);
        return fail(error);
    }
    char *stats = larder_stats(model, &error);
    fprintf(stderr, "\n%zu bytes of text from larder %s\n%s\n%s\n", bytes, larder_version(), answer, stats ? stats : "");
    larder_string_free(stats);
    larder_string_free(answer);
    larder_free(model);
    return EXIT_SUCCESS;
}
