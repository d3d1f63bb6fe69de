package larder.sample

import android.app.Activity
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.TextView
import java.io.File
import java.util.concurrent.Executors
import org.json.JSONObject

/** Slots follow the memory that the system has left. */
private const val LOAD_OPTIONS = """{"cache": "auto", "context": 1024}"""
private const val GENERATE_OPTIONS = """{"max-tokens": 256}"""

/** Loads the folder `store` of the app's files, and shows the answer to a prompt while it is generated. */
class MainActivity : Activity() {
    /** The one thread that loads and generates. */
    private val worker = Executors.newSingleThreadExecutor()

    /** Used by the worker alone. */
    private var loaded: Larder? = null

    @Volatile private var isStopped = false

    private val generate by lazy { findViewById<Button>(R.id.generate) }
    private val status by lazy { findViewById<TextView>(R.id.status) }
    private val answer by lazy { findViewById<TextView>(R.id.answer) }

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        setContentView(R.layout.main)
        val prompt = findViewById<EditText>(R.id.prompt)
        generate.setOnClickListener { generate(prompt.text.toString()) }
        findViewById<Button>(R.id.stop).setOnClickListener { isStopped = true }
        work("Loading …") {
            model()
            "Ready"
        }
    }

    override fun onDestroy() {
        isStopped = true
        worker.execute { loaded?.close() }
        worker.shutdown()
        super.onDestroy()
    }

    private fun generate(prompt: String) {
        isStopped = false
        answer.text = ""
        work("Generating …") {
            val model = model()
            val result = model.generate(prompt, GENERATE_OPTIONS) { piece ->
                runOnUiThread { answer.append(piece) }
                !isStopped
            }
            summary(JSONObject(result), JSONObject(model.stats()))
        }
    }

    /** The model, which is loaded again if that failed before. */
    private fun model() = loaded ?: Larder(store().path, LOAD_OPTIONS).also { loaded = it }

    /** Internal storage first, which has no further file system in between; adb reaches the other. */
    private fun store(): File {
        val folders = listOfNotNull(filesDir, getExternalFilesDir(null)).map { File(it, "store") }
        return folders.firstOrNull { it.exists() } ?: folders.last()
    }

    private fun summary(answer: JSONObject, stats: JSONObject): String {
        val tokens = answer.getJSONArray("tokens").length()
        val rate = tokens / answer.getDouble("decode-seconds")
        val hits = 100 * stats.getDouble("hit-rate")
        return "%d tokens, %.1f per second, %.0f %% cache hits, %s".format(tokens, rate, hits, answer.getString("finish"))
    }

    /** Runs a task on the worker, with one status before and what it returns, or its error, behind it. */
    private fun work(before: String, task: () -> String) {
        status.text = before
        generate.isEnabled = false
        worker.execute {
            val after = try {
                task()
            } catch (error: Exception) {
                error.message ?: error.toString()
            }
            runOnUiThread {
                status.text = after
                generate.isEnabled = true
            }
        }
    }
}
