// The plugin compiles Kotlin by itself from version 9.0 on.
plugins { id("com.android.application") version "9.1.0" }

android {
    namespace = "larder.sample"
    compileSdk = 36
    // From NDK 28 on, libraries are aligned for pages of 16 KiB without a flag.
    ndkVersion = "28.2.13676358"

    defaultConfig {
        applicationId = "larder.sample"
        minSdk = 24
        targetSdk = 36
        versionCode = 1
        versionName = "1.0"
        ndk { abiFilters += "arm64-v8a" }
    }

    externalNativeBuild { cmake { path = file("src/main/cpp/CMakeLists.txt") } }
}
